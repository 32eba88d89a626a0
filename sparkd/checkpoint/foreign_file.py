"""Owns how a foreign file is read in a process of its own: bounded in memory and time, and no thread of this one waits for its parser.

Python's JSON reader holds the interpreter's lock from the first byte to the last, so that a thread beside the loop is not enough: 96 MB of
small objects kept a daemon silent for 20 s, and took 2.4 GiB. Only the standard library is needed, as an agent has no more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from sparkd.errors import CheckpointError
from sparkd.execution.bounded_call import NoAnswer, call

# Less is read in this process: JSON of this size takes some 60 ms.
SMALL_BYTES = 256 << 10
MEMORY_BYTES = 1536 << 20
TIME_S: float = 30

_T = TypeVar("_T")


def is_apart(size_bytes: int) -> bool:
    """Whether a read of this size needs a process of its own. The main thread needs none: a program's other work does not wait for it."""
    return size_bytes > SMALL_BYTES and threading.current_thread() is not threading.main_thread()


def apart(function: Callable[..., _T], raw: bytes, path: str, *more: Any) -> _T:
    """Call `function(raw, path, *more)`, a function of a module of sparkd's, in a process of its own; return its plain values.

    Raises CheckpointError if the function raises it, if the process takes more memory or time than it may, if none can be started, and
    if it ends in any other way: its own words are in the log then.
    """
    try:
        return call(function, path, *more, raw=raw, time_s=TIME_S, memory_bytes=MEMORY_BYTES)
    except NoAnswer as failure:
        if failure.exceeded is not None:
            raise CheckpointError(f"{failure.reason} to read", file=path, cure="Store the model in more files") from None
        raise CheckpointError(failure.reason, file=path, cure=failure.cure) from None
