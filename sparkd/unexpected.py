"""Describes an error that no code expected: where it was raised, and whether the machine or sparkd is to blame."""

from __future__ import annotations

import errno
import os
import traceback
from pathlib import Path

from sparkd.errors import NodeRefused, SparkdError

_PACKAGE = Path(__file__).parent
# EAGAIN: of fork(), where pids.max or ulimit -u is reached.
_LACKS = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN)
)


def place_of(error: BaseException) -> str:
    """file:line of the innermost frame of this package, else of the last one; without the message, which may hold a client's text."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(_PACKAGE)]
    if ours:
        return f"{Path(ours[-1].filename).relative_to(_PACKAGE).as_posix()}:{ours[-1].lineno}"
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"


def lack_of_machine(error: BaseException) -> str | None:
    """The system's words where the machine refused something: disk, memory, descriptors, processes; None for an error of another kind."""
    if isinstance(error, OSError) and error.errno in _LACKS:
        return os.strerror(error.errno)
    if isinstance(error, MemoryError):
        return os.strerror(errno.ENOMEM)
    # CPython's words (Modules/_threadmodule.c) for what clone() refused: ulimit -u, or pids.max of the control group.
    return "no more threads or processes" if isinstance(error, RuntimeError) and str(error) == "can't start new thread" else None


def unexpected(error: BaseException) -> SparkdError:
    """The error for the user: the machine's by its name, or else sparkd's own; without the error's text, which may hold anything."""
    if (lack := lack_of_machine(error)) is not None:
        return NodeRefused(f"This node refused what sparkd needs: {lack}. Run `df` and `sparkd doctor` there.")
    return SparkdError(f"sparkd made an error ({type(error).__name__}); its log has more.")
