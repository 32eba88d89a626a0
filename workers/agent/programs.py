"""The programs of a node that its agent starts, asks and ends: copies of models, measurements of links."""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkd.errors import RankError
from workers.agent.job import Job
from workers.host.hub_cache import cache_places
from workers.host.interpreter import PACKAGE_DIR, module_command

RATE = Path(__file__).resolve().parent / "nccl_rate.py"
START_TIMEOUT_S = 20.0


class Programs:
    """A base of workers.agent.actor.Agent. Thread-safe, as the agent's methods are called on several threads."""

    def __init__(self) -> None:
        self._jobs: dict[str, tuple[str, Job]] = {}  # by name, with the task that only one job may do at a time
        self._jobs_lock = threading.Lock()
        self._begins = threading.Lock()  # held from the look for the job before to the new one's entry

    def copy(self, program: str, order: dict[str, Any], environ: dict[str, str]) -> dict[str, Any]:
        """Start to serve a model's files, `source`, or to fetch them, `sink`: see workers.files. {"job", ...what it says first}.

        Raises RankError for a program that does not start, with its own reason.
        """
        model = str(order["manifest"]["model"]) if program == "sink" else ""  # two must not write one file
        order = order | {"environ": cache_places({**os.environ, **environ})}
        command, cure = module_command(sys.executable, f"workers.files.{program}"), "run the same command again to resume"
        name, job = self._begin(model, command, {"PYTHONPATH": PACKAGE_DIR}, order, "copies", cure)
        first = job.first(START_TIMEOUT_S)
        if "error" in first:
            self.end_job(name)
            raise RankError(str(first["error"]))
        return {"job": name} | first

    def rate(self, interpreter: str, order: dict[str, Any], environ: dict[str, str]) -> str:
        """Start this node's part of a measurement between nodes: see workers.agent.nccl_rate; the job's name. Raises RankError."""
        # -P: the program's folder is no place to import from.
        command, cure = [interpreter, "-P", str(RATE)], "the nodes do not reach each other, or one hangs"
        return self._begin("rate", command, environ, order, "measures", cure)[0]

    def job_state(self, name: str) -> dict[str, Any]:
        """The program's last words. Raises RankError for one that is not known: the agent was started again."""
        with self._jobs_lock:
            _, job = self._jobs.get(name, ("", None))
        if job is None:
            raise RankError("The program was ended with the agent of that node, or by another one: run the same command again.")
        return job.state()

    def end_job(self, name: str) -> None:
        """End and forget it, if it is there."""
        with self._jobs_lock:
            _, job = self._jobs.pop(name, ("", None))
        if job is not None:
            job.end()

    def _begin(
        self, task: str, command: Sequence[str], environ: Mapping[str, str], order: Mapping[str, Any], does: str, cure: str
    ) -> tuple[str, Job]:
        """task: what only one job may do at a time, "" for any number. The one before, of a daemon that is gone, is ended first."""
        with self._begins:
            with self._jobs_lock:
                before = [name for name, (other, _) in self._jobs.items() if task and other == task]
            for name in before:
                self.end_job(name)
            try:
                job = Job(command, environ, order, does, cure)
            except OSError as error:
                raise RankError(f"{command[0]} cannot be run: {error.strerror or error}; set engine.runtime.") from None
            name = secrets.token_hex(8)
            with self._jobs_lock:
                self._jobs[name] = task, job
        return name, job
