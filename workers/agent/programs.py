"""The programs of a node that its agent starts, asks and ends: copies of models, measurements of links."""

from __future__ import annotations

import os
from typing import Any

from workers.agent.jobs import Jobs
from workers.agent.rating import Rating
from workers.host.hub_cache import cache_places


class Programs:
    """A base of workers.agent.actor.Agent."""

    def __init__(self) -> None:
        self._copies, self._rating = Jobs(), Rating()

    def copy(self, program: str, order: dict[str, Any], environ: dict[str, str]) -> dict[str, Any]:
        """Start to serve a model's files, `source`, or to fetch them, `sink`: see workers.files. {"job", ..}. Raises RankError."""
        return self._copies.start(program, order | {"environ": cache_places({**os.environ, **environ})})

    def copying(self, job: str) -> dict[str, Any]:
        """A copy's last words. Raises RankError for one that is not known."""
        return self._copies.state(job)

    def end_copy(self, job: str) -> None:
        self._copies.end(job)

    def rate(self, interpreter: str, order: dict[str, Any], environ: dict[str, str]) -> str:
        """Start this node's part of a measurement between nodes: see workers.agent.nccl_rate; the job's name. Raises RankError."""
        return self._rating.start(interpreter, order, environ)

    def rating(self, job: str) -> dict[str, Any]:
        """Its last words. Raises RankError for one that is not known."""
        return self._rating.state(job)

    def end_rate(self, job: str) -> None:
        self._rating.end(job)
