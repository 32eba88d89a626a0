"""Plans the reads: which bytes of which files go into each block of the ring, in the caller's order. Never opens a file, never holds a
byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sparkd.errors import CheckpointError
from workers.files.direct_file import ALIGNMENT
from workers.load.source_file import SourceFile


class Piece(NamedTuple):
    """One contiguous byte range to read. `key` is the caller's own; `offset` counts from the file's beginning."""

    key: Any
    path: str
    offset: int
    nbytes: int


class Span(NamedTuple):
    """The part of a piece in a block: the piece's bytes from `start` on are at the block's byte `at`."""

    piece: Piece
    start: int
    at: int
    nbytes: int
    last: bool


@dataclass(slots=True)
class Read:
    """One read from the file's byte `offset` to the block's byte `at`. It is complete after `wanted` bytes; the block has `room` bytes."""

    file: SourceFile
    offset: int
    at: int
    room: int
    wanted: int = 0

    @property
    def length(self) -> int:
        """The bytes to request from the file: a multiple of ALIGNMENT, which may exceed the file's end."""
        return -(-self.wanted // ALIGNMENT) * ALIGNMENT


class Block(NamedTuple):
    """The reads that fill one block of the ring, and the parts of pieces in it."""

    reads: list[Read]
    spans: list[Span]


def plan_blocks(pieces: Sequence[Piece], files: Mapping[str, SourceFile], block_bytes: int, gap_bytes: int) -> list[Block]:
    """The blocks for these pieces, in their order. A piece that fits a block is never cut.

    A piece that begins at most `gap_bytes` after the one before joins its read; any other piece gets a separate read, in the rest of the
    block where that suffices. Raises CheckpointError for a piece that ends beyond its file.
    """
    blocks: list[Block] = []
    read: Read | None = None
    for piece in pieces:
        file = files[piece.path]
        position, end = piece.offset, piece.offset + piece.nbytes
        if position < 0 or piece.nbytes < 0:
            raise ValueError(f"A piece of {piece.path} begins at {position} and has {piece.nbytes} bytes; neither can be negative.")
        if end > file.size_bytes:
            raise CheckpointError(f"the file ends at byte {file.size_bytes}, before byte {end}", file=file.path, cure="Download it again")
        if position == end:
            if not blocks:
                blocks.append(Block([], []))
            blocks[-1].spans.append(Span(piece, 0, 0, 0, True))
            continue
        whole = end - position // ALIGNMENT * ALIGNMENT <= block_bytes
        while position < end:
            if read is None or not _takes(read, file, position, end if whole else position + 1, gap_bytes):
                read = _next_read(blocks, read, file, position, end, block_bytes)
            stop = min(end, read.offset + read.room)
            read.wanted = max(read.wanted, stop - read.offset)
            blocks[-1].spans.append(Span(piece, position - piece.offset, read.at + position - read.offset, stop - position, stop == end))
            position = stop
    return blocks


def _takes(read: Read, file: SourceFile, position: int, end: int, gap_bytes: int) -> bool:
    """Whether the bytes from `position` to `end` can be part of `read`."""
    return read.file is file and read.offset <= position <= read.offset + read.wanted + gap_bytes and end <= read.offset + read.room


def _next_read(blocks: list[Block], before: Read | None, file: SourceFile, position: int, end: int, block_bytes: int) -> Read:
    """A read that begins at `position`: after the last read where the block has room for all of it, else in a new block."""
    offset = position // ALIGNMENT * ALIGNMENT
    at = 0 if before is None else -(-(before.at + before.length) // ALIGNMENT) * ALIGNMENT
    if before is None or at + end - offset > block_bytes:
        blocks.append(Block([], []))
        at = 0
    read = Read(file, offset, at, block_bytes - at)
    blocks[-1].reads.append(read)
    return read
