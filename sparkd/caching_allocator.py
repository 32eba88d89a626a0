"""Owns what torch's caching allocator reserves of a device for a course of allocations: pure arithmetic. Never allocates anything.

Its rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.13, without expandable segments, which vLLM sets for itself only where it
puts weights to sleep): what was freed stays reserved, the smallest free block that is large enough is cut, and a free block is joined with
its neighbours of the same segment only. So a step of a model reserves more than it ever holds at once. The lowest of blocks of one size
address goes first, and the driver of an H200 was seen to hand out addresses downwards, so that is the one of the youngest segment.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MIB = 1 << 20
# kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc, kLargeBuffer, kRoundLarge.
_BLOCK, _SMALL, _SMALL_SEGMENT, _LARGE, _LARGE_SEGMENT, _ROUND = 512, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 2 * MIB
_TOP = 1 << 56


@dataclass(slots=True, eq=False)
class Block:
    """size: bytes. stream: that it is of. before, after: its neighbours in the segment."""

    at: int
    size: int
    small: bool
    stream: int
    before: Block | None = None
    after: Block | None = None
    free: bool = False


class CachingAllocator:
    """reserved: bytes of all segments; held: of what is handed out, held_most: at once."""

    def __init__(self) -> None:
        self.reserved = self.held = self.held_most = 0
        # The blocks of each stream's pools of large and of small ones: (size, address), ascending.
        self._free: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]] = [([], [])]
        self._at: dict[int, Block] = {}
        self._lowest = _TOP

    def take(self, size: int) -> Block:
        """A block of at least `size` bytes."""
        size = max(_BLOCK, -(-size // _BLOCK) * _BLOCK)
        small = size <= _SMALL
        pool = self._free[-1][small]
        place = bisect_left(pool, (size, 0))
        if place < len(pool):
            block = self._at[pool.pop(place)[1]]
            block.free = False
        else:
            block = self._segment(size, small)
        if (left := block.size - size) >= _BLOCK and (small or left > _SMALL):
            rest = Block(block.at + size, left, small, block.stream, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.size, block.after = size, rest
            self._keep(rest)
        self.held += block.size
        self.held_most = max(self.held_most, self.held)
        return block

    def give_back(self, block: Block) -> None:
        self.held -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is None or not neighbour.free:
                continue
            self._forget(neighbour)
            first, second = (neighbour, block) if neighbour is block.before else (block, neighbour)
            first.size, first.after = first.size + second.size, second.after
            if second.after is not None:
                second.after.before = first
            block = first
        self._keep(block)

    def release(self) -> None:
        """torch.cuda.empty_cache(): segments of which nothing is handed out go back, of every stream."""
        free = [self._at[at] for pools in self._free for pool in pools for _, at in pool]
        for block in free:
            if block.before is None and block.after is None:
                self._forget(block)
                self.reserved -= block.size

    def switch(self) -> None:
        """To a stream that nothing was handed out on: what is free is another one's."""
        self._free.append(([], []))

    def _segment(self, size: int, small: bool) -> Block:
        length = _SMALL_SEGMENT if small else _LARGE_SEGMENT if size < _LARGE else -(-size // _ROUND) * _ROUND
        self.reserved += length
        # Segments never touch: blocks of two are not joined.
        self._lowest -= length + _ROUND
        return Block(self._lowest, length, small, len(self._free) - 1)

    def _keep(self, block: Block) -> None:
        block.free = True
        self._at[block.at] = block
        insort(self._free[block.stream][block.small], (block.size, block.at))

    def _forget(self, block: Block) -> None:
        block.free = False
        pool = self._free[block.stream][block.small]
        del pool[bisect_left(pool, (block.size, block.at))]
