"""Runs a program with a time limit. Never waits for one that does not end: a caller must not hang with the driver that it asks."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PLACES = "/usr/sbin:/usr/bin:/sbin:/bin"
REAP_S = 0.5

# Killed children that have not ended: they are in an uninterruptible wait. Kept to be counted, and reaped once they end.
_stuck: list[subprocess.Popen[Any]] = []
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class ProgramOutput:
    """text: the program's stdout. trouble: why there is none, None after exit status 0. hung: the program did not end in time. missing: it
    is not installed."""

    text: str
    trouble: str | None = None
    hung: bool = False
    missing: bool = False


def ask(command: Sequence[str], timeout_s: float) -> ProgramOutput:
    """Run the program. Blocks for at most timeout_s + REAP_S seconds, whatever the program does."""
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            env={"PATH": f"{os.environ.get('PATH', os.defpath)}:{PLACES}", "LC_ALL": "C"}, start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError:
        return ProgramOutput("", f"{command[0]} is not installed", missing=True)
    except OSError as error:
        return ProgramOutput("", f"{command[0]} cannot be run: {error.strerror or error}")
    try:
        text, complaint = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        let_go(child)
        return ProgramOutput("", f"{command[0]} did not answer within {timeout_s:g} s", hung=True)
    if child.returncode:
        lines = (complaint.strip() or text.strip()).splitlines()
        return ProgramOutput(text, f"{command[0]} ended with exit code {child.returncode}{': ' + lines[0][:200] if lines else ''}")
    return ProgramOutput(text)


def stuck() -> int:
    """The number of killed children that have not ended yet."""
    with _lock:
        _stuck[:] = [child for child in _stuck if child.poll() is None]
        return len(_stuck)


def let_go(child: subprocess.Popen[Any]) -> None:
    """Kill it, close its pipes and reap it. Blocks for at most REAP_S seconds; a child that has not ended then counts as stuck."""
    child.kill()
    for stream in (child.stdout, child.stderr):
        if stream:
            stream.close()
    try:
        child.wait(REAP_S)
    except subprocess.TimeoutExpired:
        with _lock:
            _stuck.append(child)
