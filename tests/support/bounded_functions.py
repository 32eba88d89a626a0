"""Functions for a process of its own (sparkd.execution.bounded_call), which imports this module."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from sparkd.errors import ConfigError, ModelFailed
from sparkd.execution.bounded_call import call

ERRORS = (
    ConfigError("no such key", file="/etc/sparkd.yaml", line=3, param="model"),
    ModelFailed("failed", retry_after_s=9, held_by=("m",)),
)


def fail(number: int) -> None:
    raise ERRORS[number]


def sleep() -> None:
    time.sleep(3600)


def take(nbytes: int) -> int:
    return len(bytearray(nbytes))


def with_descendant(path: str, number: int) -> str:
    """Start a process that holds this one's output, write its id to the file, and send this process the signal."""
    descendant = subprocess.Popen(["sleep", "3600"])
    Path(path).write_text(str(descendant.pid))
    os.kill(os.getpid(), number)
    return "answer"


def inside() -> tuple[int, int]:
    """The process of a call, and that of a call which it makes."""
    return os.getpid(), call(os.getpid, time_s=1)
