"""The copying programs of one node: started, asked, ended. Never reads a model's file itself: a copy must not take the agent along."""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections.abc import Mapping
from typing import Any

from sparkd.errors import RankError
from workers.host.interpreter import PACKAGE_DIR, module_command
from workers.host.line_reader import Spoken

PROGRAMS = ("source", "sink")
START_TIMEOUT_S = 20.0


class Jobs:
    """Job -> program. Thread-safe, as the agent's methods are called on several threads."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}
        self._lock = threading.Lock()

    def start(self, program: str, order: Mapping[str, Any]) -> dict[str, Any]:
        """{"job", ...what the program says first}. Raises RankError for a program that does not start, with its own reason."""
        if program not in PROGRAMS:
            raise RankError(f"{program!r} is no program that copies.")
        if program == "sink":
            self._end_earlier(str(order["manifest"]["model"]))
        job = _Job(program, order)
        first = job.first(START_TIMEOUT_S)
        if "error" in first:
            job.end()
            raise RankError(str(first["error"]))
        name = secrets.token_hex(8)
        with self._lock:
            self._jobs[name] = job
        return {"job": name} | first

    def state(self, name: str) -> dict[str, Any]:
        """The program's last words, and {"running": bool}. Raises RankError for one that is not known: the agent was started again."""
        with self._lock:
            job = self._jobs.get(name)
        if job is None:
            raise RankError("The copy was ended with the agent of that node; what was verified stays: run the same again to go on.")
        return job.state()

    def _end_earlier(self, model: str) -> None:
        """End the copies of a daemon that was killed: two must not write one file."""
        with self._lock:
            alike = [name for name, job in self._jobs.items() if job.fetches == model]
        for name in alike:
            self.end(name)

    def end(self, name: str) -> None:
        """End and forget it, if it is there."""
        with self._lock:
            job = self._jobs.pop(name, None)
        if job is not None:
            job.end()


class _Job:
    def __init__(self, program: str, order: Mapping[str, Any]) -> None:
        environ = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}
        command = module_command(sys.executable, f"workers.files.{program}")
        self._program = Spoken(command, environ | {"PYTHONPATH": PACKAGE_DIR}, order, "copies")
        self.fetches = str(order["manifest"]["model"]) if program == "sink" else None

    def first(self, timeout_s: float) -> dict[str, Any]:
        if not self._program.wait_for_a_word(timeout_s):
            return {"error": f"The program that copies said nothing within {timeout_s:.0f} s."}
        return self._program.last or {"error": "The program that copies ended without a message."}

    def state(self) -> dict[str, Any]:
        running, is_over = self._program.running, self._program.is_over
        if not running and not is_over:
            return {"running": False, "error": "The program that copies ended without a message; run the same command again to resume."}
        return {"running": running and not is_over} | self._program.last

    def end(self) -> None:
        self._program.end()
