"""Owns reading the headers of many files at once, by copies of this process. Never reads one another way than one alone is read.

For a command that does nothing else meanwhile: taking a header apart is work for one core, and threads of Python share one.
"""

from __future__ import annotations

import marshal
import os
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import IO, Any

from sparkd.safetensors import Shard, read_header
from sparkd.tensors import FileTensors, Kind

Header = tuple[Shard, FileTensors]
# Of small files, so many are read in the time that a copy of the process takes to start.
FEWEST_FILES = 16


def idle_cores(most: int) -> int:
    """At least 1: how many processes need not wait for one another. By the load of the last minute, in which this process hardly counts."""
    return max(1, min(most, len(os.sched_getaffinity(0)) - int(os.getloadavg()[0])))


def read_headers(paths: Sequence[str], processes: int) -> Iterator[Header]:
    """In the order of `paths`, by up to so many processes, this one included. Raises CheckpointError.

    A copy that ends early, or finds a fault, leaves its files to this process. With other threads there are no copies: what those hold
    would be held in a copy for ever (fork(2), NOTES).
    """
    count = min(processes, len(paths) // FEWEST_FILES)
    if count < 2 or threading.active_count() > 1:
        yield from map(read_header, paths)
        return
    bounds = [number * len(paths) // count for number in range(count + 1)]
    parts = [paths[start:end] for start, end in pairwise(bounds)]
    with ExitStack() as copies:
        pipes = [_begun(part, copies) for part in parts[1:]]
        yield from map(read_header, parts[0])
        for part, pipe in zip(parts[1:], pipes, strict=True):
            found = 0
            for header in _received(pipe):
                found += 1
                yield header
            yield from map(read_header, part[found:])


def _begun(paths: Sequence[str], copies: ExitStack) -> IO[bytes]:
    """What a copy of this process writes of its part."""
    ours, theirs = os.pipe()
    copy = os.fork()
    if copy == 0:
        status = 1
        try:
            os.close(ours)
            with open(theirs, "wb") as pipe:
                for header in map(read_header, paths):
                    marshal.dump(_sent(header), pipe)
            status = 0
        finally:
            # Nothing of this process may be ended twice: neither its buffers nor its exit handlers.
            os._exit(status)
    os.close(theirs)
    copies.callback(os.waitpid, copy, 0)
    # Closed before it is waited for, so that a copy whose work nobody wants ends as well.
    return copies.enter_context(open(ours, "rb"))


def _received(pipe: IO[bytes]) -> Iterator[Header]:
    while True:
        try:
            identity, (path, begin, names), kinds, numbers = marshal.load(pipe)
        except (EOFError, ValueError, TypeError):
            return
        known = [Kind(*kind) for kind in kinds]
        yield Shard(*identity), FileTensors(path, begin, names, tuple(map(known.__getitem__, array("I", numbers))))


def _sent(header: Header) -> Any:
    shard, tensors = header
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(tensors.kinds))}
    identity = shard.path, shard.size_bytes, shard.mtime_ns, shard.header_bytes, shard.header_sha256
    of_tensors = array("I", map(numbers.__getitem__, tensors.kinds))
    return identity, (tensors.path, tensors.begin, tensors.names), [tuple(kind) for kind in numbers], of_tensors.tobytes()
