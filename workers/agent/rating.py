"""The measuring program of one node: started, asked, ended. Never measures in the agent's own process, never runs two at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkd.errors import RankError
from workers.agent.latest import Latest
from workers.host.line_reader import Spoken

PROGRAM = Path(__file__).resolve().parent / "nccl_rate.py"
# Where the interpreter's libraries and devices are; what NCCL and Gloo shall do comes with the order.
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME")


class Rating:
    """Thread-safe."""

    def __init__(self) -> None:
        self._runs: Latest[_Run] = Latest("The measurement was ended with the agent of that node, or by another one: run it again.")

    def start(self, interpreter: str, order: Mapping[str, Any], environ: Mapping[str, str]) -> str:
        """The job's name. Raises RankError for an interpreter that cannot be run."""
        return self._runs.begin(lambda: _Run(interpreter, order, environ))

    def state(self, name: str) -> dict[str, Any]:
        """The program's last words, and {"running": bool}. Raises RankError for one that is not known."""
        return self._runs.find(name).state()

    def end(self, name: str) -> None:
        """End and forget it, if it is there."""
        self._runs.end(name)


class _Run:
    def __init__(self, interpreter: str, order: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        inherited = {name: value for name, value in os.environ.items() if name in _KEPT}
        try:
            # -P: the program's folder is no place to import from.
            self._program = Spoken([interpreter, "-P", str(PROGRAM)], inherited | dict(environ), order, "measures")
        except OSError as error:
            raise RankError(f"{interpreter} cannot be run: {error.strerror or error}; set engine.runtime.") from None

    def state(self) -> dict[str, Any]:
        running = self._program.running
        if not running and not self._program.is_over:
            code = self._program.process.returncode
            how = "did not end within its time" if code == -signal.SIGALRM else f"ended without a message (exit code {code})"
            return {"running": False, "error": f"The program that measures {how}: the nodes do not reach each other, or one hangs."}
        return {"running": running} | self._program.last

    def end(self) -> None:
        self._program.end()
