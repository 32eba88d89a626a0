"""Every byte that was asked for, in order, through a bounded ring, whatever the layout and the consumer do."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.workers.load.shards import (
    KIB,
    any_range,
    contents,
    drain,
    expected,
    make_reader,
    released,
    shard_of,
    write_shard,
)
from workers.load.reader import ByteRange, Chunk, Reader

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_the_order_is_the_callers_and_a_key_is_handed_back(shards: dict[str, bytes]) -> None:
    path = shard_of(shards, 300_007)
    key = object()
    ranges = [ByteRange(key, path, 200_000, 10), ByteRange("b", path, 5, 100), ByteRange(None, path, 100_000, 1)]
    with make_reader(ranges) as reader:
        seen = [(chunk.byte_range, bytes(chunk.view.numpy())) for chunk in released(reader)]
    assert seen == [(byte_range, shards[path][byte_range.offset : byte_range.offset + byte_range.nbytes]) for byte_range in ranges]
    assert seen[0][0].key is key


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_chunks_are_the_files_bytes(shards: dict[str, bytes], data: st.DataObject) -> None:
    """Any offsets, lengths, overlaps, gaps and order over several files, any ring, any number of threads, released late, in any order."""
    ranges = data.draw(st.lists(any_range(shards), max_size=40))
    block_bytes = data.draw(st.integers(1, 16)) * 4 * KIB
    blocks = data.draw(st.integers(2, 8))
    hold = data.draw(st.integers(0, blocks - 1))
    rng = data.draw(st.randoms(use_true_random=False))
    reader = Reader(
        ranges,
        block_bytes=block_bytes,
        blocks=blocks,
        threads=data.draw(st.integers(1, 4)),
        pin=False,
    )
    found: list[bytearray] = []
    held: list[tuple[Chunk, bytes]] = []
    with reader:
        for chunk in reader:
            view, byte_range = chunk.view, chunk.byte_range
            assert (view.dtype, view.dim(), view.is_contiguous(), view.device.type) == (torch.uint8, 1, True, "cpu")
            if chunk.start == 0:
                assert byte_range is ranges[len(found)]
                found.append(bytearray())
            assert len(found[-1]) == chunk.start
            found[-1] += bytes(view.numpy())
            assert chunk.last == (len(found[-1]) == byte_range.nbytes)
            if view.numel():
                assert (view.data_ptr() - byte_range.offset - chunk.start) % 4096 == 0
            if byte_range.nbytes + byte_range.offset % 4096 <= block_bytes:
                assert chunk.last and chunk.start == 0, "a range that fits a block is whole"
            held.append((chunk, bytes(view.numpy())))
            while held and reader.held_blocks > hold:
                late, bytes_then = held.pop(rng.randrange(len(held)))
                assert bytes(late.view.numpy()) == bytes_then, "a block was reused under a chunk that was held"
                late.release()
    assert [bytes(one) for one in found] == [shards[one.path][one.offset : one.offset + one.nbytes] for one in ranges]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_short_reads_are_continued(shards: dict[str, bytes], data: st.DataObject) -> None:
    """A read may give less than was asked at any time (signals, network file systems), with O_DIRECT in whole aligned blocks."""
    ranges = data.draw(st.lists(any_range(shards), min_size=1, max_size=10))
    seed = data.draw(st.integers(0, 99))
    real = os.preadv

    def short(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        length = max(4096, random.Random(seed + offset).randrange(len(buffers[0])) // 4096 * 4096)
        return real(fd, [buffers[0][:length]], offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", short)
        assert contents(make_reader(ranges, block_bytes=64 * KIB)) == expected(shards, ranges)


def test_neighbours_share_reads_and_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_shard(tmp_path, 4 << 20)
    ranges = [ByteRange(n, path, 13 + n * 1000, 900) for n in range(2000)]
    reads: list[int] = []
    _count_reads(monkeypatch, reads)
    reader = make_reader(ranges, block_bytes=1 << 20)
    drain(reader)
    assert len(reads) == 2
    assert ranges[-1].offset + 900 - 13 <= reader.stats.bytes_read <= ranges[-1].offset + 900 + 3 * 4096


def test_far_pieces_are_read_alone_and_share_a_block(tmp_path: Path) -> None:
    path = write_shard(tmp_path, 8 << 20)
    ranges = [ByteRange(n, path, n << 20, 100) for n in (7, 2, 5, 0)]
    reader = make_reader(ranges, blocks=2)
    held = []
    with reader:
        for chunk in reader:
            held.append(chunk)
        assert reader.held_blocks == 1
        assert reader.stats.bytes_read == 4 * 4096
    assert [chunk.byte_range.key for chunk in held] == [7, 2, 5, 0]


def test_empty_pieces_are_one_empty_chunk_each(shards: dict[str, bytes]) -> None:
    path = shard_of(shards, 0)
    with make_reader([ByteRange("a", path, 0, 0), ByteRange("b", path, 0, 0)]) as reader:
        seen = [(chunk.byte_range.key, chunk.start, chunk.view.numel(), chunk.last) for chunk in released(reader)]
        assert reader.held_blocks == 0
    assert reader.stats.unpinned_reason is None
    assert seen == [("a", 0, 0, True), ("b", 0, 0, True)]
    assert contents(make_reader([])) == []


def test_nothing_is_read_that_has_no_place(tmp_path: Path) -> None:
    path = write_shard(tmp_path, 1 << 20)
    with make_reader([ByteRange(0, path, 0, 1 << 20)], block_bytes=4096, blocks=4) as reader:
        chunks = iter(reader)
        held = [next(chunks) for _ in range(4)]
        assert (reader.held_blocks, reader.stats.bytes_read) == (4, 4 * 4096)
        held.pop(2).release()
        held.append(next(chunks))
        assert (held[-1].start, reader.held_blocks) == (4 * 4096, 4)


PINNED = [("device", 3), ("synchronize", 0), ("unregister", 0)]
REFUSED = [("cuda:3", 0)]


class FakeRuntime:
    """As much of torch.cuda.cudart() as the ring uses."""

    def __init__(self, result: int) -> None:
        self.result = result
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, _address: int, size: int, flags: int) -> int:
        assert flags == 0
        self.calls.append(("register", size))
        return self.result

    def cudaHostUnregister(self, _address: int) -> int:
        self.calls.append(("unregister", 0))
        return 0

    def kernel(self, *_: object, device: str) -> None:
        self.calls.append((device, 0))
        raise RuntimeError("CUDA error: an earlier one")

    def cudaGetErrorString(self, result: int) -> str:
        return f"error {result}"


@pytest.mark.parametrize(("result", "reason", "calls"), [(0, None, PINNED), (2, "cudaHostRegister failed: error 2", REFUSED)])
def test_the_ring_is_pinned_as_one_and_unpinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: int, reason: str | None, calls: list[tuple[str, int]]
) -> None:
    runtime = FakeRuntime(result)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(runtime.calls.append(("device", device))))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: runtime.calls.append(("synchronize", 0)))
    monkeypatch.setattr(torch, "zeros", runtime.kernel)
    reader = make_reader([ByteRange(0, write_shard(tmp_path, 4096), 0, 4096)], pin=True)
    drain(reader)
    assert reader.stats.unpinned_reason == reason
    assert runtime.calls == [("register", 4 * 64 * KIB), *calls]


def test_without_cuda_the_ring_is_not_pinned_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reader = make_reader([ByteRange(0, write_shard(tmp_path, 4096), 0, 4096)], pin=True)
    drain(reader)
    assert "CUDA" in str(reader.stats.unpinned_reason)


def test_under_another_default_device(shards: dict[str, bytes]) -> None:
    """vLLM loads weights inside a `with device:`."""
    path = shard_of(shards, 4097)
    with torch.device("meta"):
        assert contents(make_reader([ByteRange(0, path, 0, 4097)])) == [shards[path]]


def _count_reads(patch: pytest.MonkeyPatch, lengths: list[int]) -> None:
    real = os.preadv

    def counted(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        lengths.append(len(buffers[0]))
        return real(fd, buffers, offset)

    patch.setattr(os, "preadv", counted)
