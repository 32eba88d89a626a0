"""The processes of this machine as tests look at them: what has gone has no command, no parent and no session.

What belongs to somebody else says nothing of its environment to who is not root, as one that has gone.
"""

from __future__ import annotations

import os
from contextlib import suppress

import psutil


def alive(pid: int) -> bool:
    """A zombie has ended."""
    with suppress(psutil.Error):
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def command_of(pid: int) -> list[str]:
    with suppress(psutil.Error):
        return psutil.Process(pid).cmdline()
    return []


def text_of(pid: int) -> str:
    """Command line and environment, a word or a variable on each line."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return "\n".join([*process.cmdline(), *(f"{name}={value}" for name, value in process.environ().items())])
    return ""


def parent_of(pid: int) -> int:
    with suppress(psutil.Error):
        return psutil.Process(pid).ppid()
    return -1


def session_of(pid: int) -> int:
    with suppress(ProcessLookupError):
        return os.getsid(pid)
    return -1


def members(session: int) -> list[int]:
    """The living processes of a session, of a rank's with its shim."""
    return [pid for pid in psutil.pids() if session_of(pid) == session and alive(pid)]
