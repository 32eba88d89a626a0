"""Reads a foreign checkpoint without keeping the event loop of this process from its work.

Hostile side: the author of a repository on a hub. Python's JSON parser holds the interpreter's lock for a whole text, in any thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from sparkd.checkpoint import CONFIG, INDEX, MODELOPT, PARAMS
from sparkd.checkpoint.header import PREFIX_BYTES, open_regular
from sparkd.errors import CheckpointError, CheckpointUnread
from sparkd.execution.bounded_call import NoAnswer, call

# JSON of this size is parsed in some hundredths of a second. Most models have less: about 200 bytes for each tensor, in header and index.
SMALL_BYTES = 1 << 20
# The headers of the largest published models take 10 s.
LIMIT_S = 60.0
_T = TypeVar("_T")


def read_bounded(read: Callable[..., _T], source: str, *arguments: Any) -> _T:
    """`read(source, *arguments)`: at once for a folder of small files, else in a process that is bounded in time and memory. Blocks.

    read: a function of a module of ours.
    source: a folder or a hub id. The size of a hub's files is unknown before they are read.

    Raises the errors of `read`, and CheckpointUnread where the process gives no answer.
    """
    if os.path.isabs(source) and _json_bytes(source) <= SMALL_BYTES:
        return read(source, *arguments)
    try:
        return call(read, source, *arguments, time_s=LIMIT_S)
    except NoAnswer as failure:
        raise CheckpointUnread(f"its headers cannot be read: {failure.reason}", file=source, cure=failure.cure) from None


def _json_bytes(folder: str) -> int:
    """The size of all the JSON that a checkpoint in this folder may have. An index may name any file there as one with a header."""
    try:
        return sum(_file_json_bytes(os.path.join(folder, name), name) for name in os.listdir(folder))
    except OSError:
        return 0  # `read` says why


def _file_json_bytes(path: str, name: str) -> int:
    try:
        with open_regular(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if name in (CONFIG, PARAMS, MODELOPT, INDEX):
                return size_bytes
            header_bytes = int.from_bytes(file.read(PREFIX_BYTES), "little")
    except (CheckpointError, OSError):
        return 0
    return header_bytes if header_bytes <= size_bytes else 0
