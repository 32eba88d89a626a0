"""Owns parsing a foreign file in a separate process: with limits on memory and time, and without blocking this process.

Python's JSON parser holds the interpreter's lock for the whole text, so a thread is not enough: 96 MB of small objects blocked a daemon
for 20 s and took 2.4 GiB. Only the standard library is needed, because an agent has no more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from sparkd.errors import CheckpointError
from sparkd.execution.bounded_call import NoAnswer, call

# Smaller files are parsed in this process: JSON of this size takes some 60 ms.
SMALL_BYTES = 256 << 10
MEMORY_BYTES = 1536 << 20
TIME_S: float = 30

_T = TypeVar("_T")


def is_apart(size_bytes: int) -> bool:
    """Whether a file of this size is parsed in a separate process. Not on the main thread, whose program has no other work to block."""
    return size_bytes > SMALL_BYTES and threading.current_thread() is not threading.main_thread()


def apart(function: Callable[..., _T], raw: bytes, path: str, *more: Any) -> _T:
    """Call `function(raw, path, *more)`, a module-level function of sparkd's, in a separate process; return its plain values.

    Raises CheckpointError if the function raises it, if the process exceeds its memory or time, if it cannot be started, and if it ends in
    any other way: then the log has its output.
    """
    try:
        return call(function, path, *more, raw=raw, time_s=TIME_S, memory_bytes=MEMORY_BYTES)
    except NoAnswer as failure:
        if failure.exceeded is not None:
            raise CheckpointError(f"{failure.reason} to read", file=path, cure="Store the model in more files") from None
        raise CheckpointError(failure.reason, file=path, cure=failure.cure) from None
