"""Owns the one job of a kind that a node does for a daemon: begun, looked up by its name, ended. Never two at once."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from sparkd.errors import RankError


class Job(Protocol):
    def end(self) -> None: ...


AnyJob = TypeVar("AnyJob", bound=Job)


class Latest(Generic[AnyJob]):
    """Thread-safe, as the agent's methods are called on several threads. unknown: a RankError's sentence for a name that is not known."""

    def __init__(self, unknown: str) -> None:
        self._unknown = unknown
        self._lock = threading.Lock()
        self._name = ""
        self._job: AnyJob | None = None

    def begin(self, make: Callable[[], AnyJob]) -> str:
        """The new job's name. The one before, of a daemon that is gone, is ended first."""
        self._replace("", None)
        name = secrets.token_hex(8)
        self._replace(name, make())
        return name

    def find(self, name: str) -> AnyJob:
        """Raises RankError for one that is not known."""
        with self._lock:
            job = self._job if name == self._name else None
        if job is None:
            raise RankError(self._unknown)
        return job

    def end(self, name: str) -> None:
        """End and forget it, if it is there."""
        with self._lock:
            job, self._job = (self._job, None) if name == self._name else (None, self._job)
        if job is not None:
            job.end()

    def _replace(self, name: str, job: AnyJob | None) -> None:
        with self._lock:
            before, self._name, self._job = self._job, name, job
        if before is not None:
            before.end()
