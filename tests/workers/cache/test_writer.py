"""Tensors at their places: any order, any pieces, a ring that is too small, a disk that fails. Real files."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.errors import CheckpointError
from tests.support.waiting import HUNG_S
from workers.cache.layout import ShardLayout, ShardTensor, Tensors, lay_out
from workers.cache.writer import ShardWriter, Staging
from workers.files import direct_file
from workers.files.direct_file import DirectFile

BLOCK = 4096


def content(shards: list[ShardLayout]) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return {
        place.name: torch.randint(256, (place.nbytes,), dtype=torch.uint8, generator=made) for shard in shards for place in shard.tensors
    }


def expected(shard: ShardLayout, tensors: dict[str, torch.Tensor]) -> bytes:
    return shard.header + b"".join(tensors[place.name].numpy().tobytes() for place in shard.tensors)


def writer(folder: Path, shards: list[ShardLayout], *, blocks: int = 4, threads: int = 1, **more: Any) -> ShardWriter:
    return ShardWriter(str(folder), shards, Staging(blocks * BLOCK, BLOCK, threads=threads), **more)


class Gate:
    """A disk that takes nothing until it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.writes = 0
        real = DirectFile.write

        def write(file: DirectFile, offset: int, data: memoryview) -> None:
            if offset:  # not a header
                self.writes += 1
                assert self.open.wait(HUNG_S)
            real(file, offset, data)

        monkeypatch.setattr(DirectFile, "write", write)


LAYOUTS = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=6), st.tuples(st.just("U8"), st.tuples(st.integers(0, 5 * BLOCK))), min_size=1, max_size=10
)


@settings(max_examples=40, deadline=None)
@given(
    tensors=LAYOUTS,
    data=st.data(),
    shard_bytes=st.sampled_from([3 * BLOCK, 1 << 30]),
    threads=st.sampled_from([1, 3]),
)
def test_the_files_are_what_was_put(
    tmp_path_factory: pytest.TempPathFactory, tensors: Tensors, data: st.DataObject, shard_bytes: int, threads: int
) -> None:
    folder = tmp_path_factory.mktemp("writer")
    shards = lay_out(tensors, shard_bytes)
    values = content(shards)
    with contextlib.closing(writer(folder, shards, threads=threads)) as made:  # an example may end at any draw
        order = data.draw(st.permutations(sorted(values)))
        for name in order:
            place, value = made.tensors[name], values[name].clone()
            edges = sorted({0, place.nbytes, *data.draw(st.lists(st.integers(0, place.nbytes), max_size=2))})
            for start, stop in itertools.pairwise(edges):
                made.put([place], value[start:stop], start)
            # The writer has its own copy.
            value.zero_()
        made.settle()

    for shard in shards:
        assert (folder / shard.name).read_bytes() == expected(shard, values)
    assert made.bytes_written == made.bytes_total


@pytest.mark.parametrize("size", [100, BLOCK, 7 * BLOCK])
def test_neighbours_are_put_as_one(tmp_path: Path, size: int) -> None:
    shards = lay_out({f"t{number}": ("U8", (size,)) for number in range(12)})
    values = content(shards)
    made = writer(tmp_path, shards)
    places = list(made.tensors.values())
    for group in (places[2:7], places[7:], places[:2]):
        together = torch.cat([values[place.name] for place in group])
        made.put(group, together)
        together.zero_()

    made.settle()
    assert (tmp_path / shards[0].name).read_bytes() == expected(shards[0], values)


@pytest.mark.parametrize("came", [0, BLOCK - 1])
def test_a_tensor_that_did_not_come_whole_is_named(tmp_path: Path, came: int) -> None:
    shards = lay_out({"a": ("U8", (BLOCK,)), "b": ("U8", (BLOCK,))})
    made = writer(tmp_path, shards)
    made.put([made.tensors["a"]], content(shards)["a"])
    made.put([made.tensors["b"]], torch.zeros(came, dtype=torch.uint8))

    with pytest.raises(CheckpointError, match=r"^b: "):
        made.settle()
    made.close()


def test_who_puts_waits_for_a_slow_disk_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes nothing until the one who waits has been told so."""
    monkeypatch.setattr("workers.cache.writer.LOOK_S", 0.001)
    gate = Gate(monkeypatch)
    shards = lay_out({f"t{number}": ("U8", (BLOCK,)) for number in range(12)})
    values = content(shards)
    told: list[float] = []

    def waits(seconds: float) -> None:
        told.append(seconds)
        gate.open.set()

    made = writer(tmp_path, shards, waits=waits)
    for name, place in made.tensors.items():
        made.put([place], values[name])

    assert told == sorted(told)
    assert made.waited_s == told[-1] > 0
    assert gate.writes
    made.settle()
    assert (tmp_path / shards[0].name).read_bytes() == expected(shards[0], values)


def test_its_files_have_their_size_before_the_first_byte(tmp_path: Path) -> None:
    shards = lay_out({f"t{number}": ("U8", (4 * BLOCK,)) for number in range(3)}, 4 * BLOCK)
    made = writer(tmp_path, shards)

    assert [(tmp_path / shard.name).stat().st_blocks * 512 >= shard.size_bytes for shard in shards] == [True] * 3
    made.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_disk_that_fails_ends_it_and_nothing_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    shards = lay_out({f"t{number}": ("U8", (BLOCK,)) for number in range(40)})
    values = content(shards)
    made = writer(tmp_path, shards, threads=threads)

    def full(_fd: int, _data: Sequence[memoryview], _offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(direct_file.os, "pwritev", full)
    with pytest.raises(OSError, match="No space left"):
        for name, place in made.tensors.items():
            made.put([place], values[name])
    with pytest.raises(OSError, match="No space left"):
        made.flush()
    with pytest.raises(OSError, match="No space left"):
        made.settle()
    made.close()
    made.close()


def test_a_disk_that_failed_leaves_no_tensor_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load goes on without its cache, and collects no old garbage meanwhile. The ring is the same memory as the error's frames hold."""
    shards = lay_out({f"t{number}": ("U8", (8 * BLOCK,)) for number in range(4)})
    made = writer(tmp_path, shards)
    ring = weakref.ref(made._ring._tensor)
    held: list[weakref.ref[torch.Tensor]] = []

    def full(_fd: int, _data: Sequence[memoryview], _offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def put(place: ShardTensor) -> None:
        view = torch.zeros(place.nbytes, dtype=torch.uint8)
        held.append(weakref.ref(view))
        made.put([place], view)

    monkeypatch.setattr(direct_file.os, "pwritev", full)
    gc.disable()
    try:
        with contextlib.suppress(OSError):
            for place in made.tensors.values():
                put(place)
        made.close()
        assert [view() for view in held] == [None] * len(held)
        assert ring() is None
    finally:
        gc.enable()


def test_a_header_of_whole_pages_is_written_past_the_page_cache_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of memory that is not aligned, a disk would refuse it, and the file would go on through the page cache."""
    short = len(lay_out({"": ("U8", (BLOCK,))})[0].header)
    shards = lay_out({"n" * (BLOCK - short): ("U8", (BLOCK,))})
    headers: list[int] = []
    real = DirectFile.write

    def write(file: DirectFile, offset: int, data: memoryview) -> None:
        if not offset:
            headers.append(np.frombuffer(data, np.uint8).ctypes.data % BLOCK)
        real(file, offset, data)

    monkeypatch.setattr(DirectFile, "write", write)
    writer(tmp_path, shards).close()

    assert len(shards[0].header) == BLOCK
    assert headers == [0]


def test_a_disk_that_is_full_from_the_beginning_leaves_no_open_file(tmp_path: Path, leaves_nothing: None) -> None:
    shards = lay_out({f"t{number}": ("U8", (BLOCK,)) for number in range(3)}, BLOCK)
    (tmp_path / shards[-1].name).mkdir()

    with pytest.raises(IsADirectoryError):
        writer(tmp_path, shards)


def test_closing_before_the_end_leaves_what_was_not_written(tmp_path: Path) -> None:
    shards = lay_out({"t": ("U8", (64 * BLOCK,))})
    made = writer(tmp_path, shards)
    made.put([made.tensors["t"]], torch.zeros(BLOCK, dtype=torch.uint8))

    made.close()

    assert made.bytes_written < made.bytes_total


def test_bytes_of_a_device_are_written_once_its_copies_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the writer asks of a device: a stream, and an event in it."""
    idle, awaited = threading.Event(), threading.Event()

    class OnDevice(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    def synchronize() -> None:
        awaited.set()
        assert idle.wait(HUNG_S)

    event = SimpleNamespace(synchronize=synchronize)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(record_event=lambda: event))
    shards = lay_out({"t": ("U8", (3 * BLOCK,))})
    values = content(shards)
    made = writer(tmp_path, shards)
    made.put([made.tensors["t"]], values["t"].clone().as_subclass(OnDevice))

    assert awaited.wait(HUNG_S)
    assert made.bytes_written == len(shards[0].header)
    idle.set()
    made.settle()
    assert (tmp_path / shards[0].name).read_bytes() == expected(shards[0], values)
