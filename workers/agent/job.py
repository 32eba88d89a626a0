"""Runs a program that gets one order and reports its progress in JSON lines. Never knows the meaning of the order.

The program gets its order on stdin, so that no key is in a command line, and ends when stdin closes: with the agent that started it. A
copy or a measurement that dies does not take the agent along.
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

END_TIMEOUT_S = 5.0
# Where the interpreter's libraries and devices are.
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME")


class Job:
    """A running program.

    does: its purpose, as in "the program that copies".
    cure: what to do where it ended without a message.

    Raises OSError where the command cannot be run. `end` ends the program and all processes that it started.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], order: Mapping[str, Any], does: str, cure: str) -> None:
        self._does, self._cure = does, cure
        self._last: dict[str, Any] = {}
        self._said = threading.Event()
        kept = {name: value for name, value in os.environ.items() if name in _KEPT and value}
        self.process = subprocess.Popen(
            list(command),
            cwd="/",
            env=kept | dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"{does} answers", daemon=True)
        self._reader.start()
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.write(json.dumps(dict(order)) + "\n")
                self.process.stdin.flush()

    def first(self, timeout_s: float) -> dict[str, Any]:
        """The program's first words; {"error"} where it says none within timeout_s seconds."""
        if not self._said.wait(timeout_s):
            return {"error": f"The program that {self._does} said nothing within {timeout_s:.0f} s."}
        return self._last or {"error": f"The program that {self._does} ended without a message: {self._cure}."}

    def state(self) -> dict[str, Any]:
        """The program's last words."""
        if self.process.poll() is not None:
            self._reader.join(END_TIMEOUT_S)  # its last words may be in the pipe
            if not {"ended", "error"} & set(self._last):
                code = self.process.returncode
                how = "did not end within its time" if code == -signal.SIGALRM else f"ended without a message (exit code {code})"
                return {"error": f"The program that {self._does} {how}: {self._cure}."}
        return dict(self._last)

    def end(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_TIMEOUT_S)
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()

    def _read(self) -> None:
        if self.process.stdout is not None:
            with self.process.stdout as lines:
                for line in lines:
                    with suppress(ValueError, TypeError):  # a library's own words
                        self._last = dict(json.loads(line))
                        self._said.set()
        self._said.set()
