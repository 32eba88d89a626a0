"""Runs a program that gets one order and reports its progress in JSON lines. Never knows the meaning of the order.

The program gets its order on stdin, so that no key is in a command line, and ends when stdin closes: with the agent that started it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from sparkd.errors import RankError

END_TIMEOUT_S = 5.0


class Spoken:
    """A running program. does: its purpose, as in "the program that copies". last: the newest JSON object of its output, {} before any.

    Raises OSError where the command cannot be run. `end` ends the program and all processes that it started.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], order: Mapping[str, Any], does: str) -> None:
        self.last: dict[str, Any] = {}
        self.process = subprocess.Popen(
            list(command),
            cwd="/",
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        if self.process.stdin is None:
            raise RankError(f"The program that {does} was started without a pipe.")
        self._order = self.process.stdin
        self._said = threading.Event()
        self._reader = threading.Thread(target=self._read, name=f"{does} answers", daemon=True)
        self._reader.start()
        with suppress(OSError):
            self._order.write(json.dumps(dict(order)) + "\n")
            self._order.flush()

    @property
    def running(self) -> bool:
        """Whether the program runs. Once it does not, `last` is its final output, which may have been in the pipe."""
        if self.process.poll() is None:
            return True
        self._reader.join(END_TIMEOUT_S)
        return False

    @property
    def is_over(self) -> bool:
        """Whether the program has written its final line."""
        return "ended" in self.last or "error" in self.last

    def wait_for_a_word(self, timeout_s: float) -> bool:
        """Wait for output of the program. False where none came within timeout_s seconds; the program may have ended."""
        return self._said.wait(timeout_s)

    def end(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_TIMEOUT_S)
        with suppress(OSError):
            self._order.close()

    def _read(self) -> None:
        if self.process.stdout is not None:
            with self.process.stdout as lines:
                for line in lines:
                    with suppress(ValueError):
                        self.last = dict(json.loads(line))
                        self._said.set()
        self._said.set()
