"""Gives a program its input before it starts, so that no write meets one that has ended at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def given_input(data: bytes) -> Iterator[int]:
    """A descriptor for stdin, with `data` of at most 4096 bytes (PIPE_BUF). The program's input ends with the context."""
    read, write = os.pipe()
    try:
        os.write(write, data)
        yield read
    finally:
        os.close(read)
        os.close(write)
