"""Tensors at their places: any order, any pieces, a ring that is too small, a disk that fails. Real files."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.waiting import HUNG_S
from workers.cache.layout import ShardLayout, Tensors, lay_out
from workers.cache.shard_writer import ShardWriter, Staging
from workers.files import direct_target
from workers.files.direct_target import TargetFile

BLOCK = 4096


def content(shards: list[ShardLayout]) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return {slot.name: torch.randint(256, (slot.nbytes,), dtype=torch.uint8, generator=made) for shard in shards for slot in shard.slots}


def expected(shard: ShardLayout, tensors: dict[str, torch.Tensor]) -> bytes:
    return shard.header + b"".join(tensors[slot.name].numpy().tobytes() for slot in shard.slots)


def writer(
    folder: Path, shards: list[ShardLayout], *, blocks: int = 4, prepare: Callable[[], str] | None = None, **more: object
) -> ShardWriter:
    made = prepare or (lambda: str(folder))
    named = {name: more.pop(name) for name in ("hold_bytes", "pin", "threads") if name in more}
    return ShardWriter(shards, made, staging=Staging(blocks * BLOCK, BLOCK, **named), **more)  # type: ignore[arg-type]


def fill_gaps(made: ShardWriter, tensors: dict[str, torch.Tensor]) -> int:
    made.flush()
    gaps = list(made.gaps())
    for slot, start, stop in gaps:
        assert made.put(slot, start, tensors[slot.name][start:stop], wait=True)
    return len(gaps)


class Gate:
    """A `prepare` that waits, so that nothing is written until it is opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open = threading.Event()

    def __call__(self) -> str:
        assert self.open.wait(HUNG_S)
        return str(self.folder)


LAYOUTS = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=6), st.tuples(st.just("U8"), st.tuples(st.integers(0, 5 * BLOCK))), min_size=1, max_size=10
)


@settings(max_examples=40, deadline=None)
@given(
    tensors=LAYOUTS,
    data=st.data(),
    shard_bytes=st.sampled_from([3 * BLOCK, 1 << 30]),
    direct=st.booleans(),
    hold=st.sampled_from([0, 8 * BLOCK]),
    threads=st.sampled_from([1, 3]),
)
def test_the_files_are_what_was_put(
    tmp_path_factory: pytest.TempPathFactory, tensors: Tensors, data: st.DataObject, shard_bytes: int, direct: bool, hold: int, threads: int
) -> None:
    folder = tmp_path_factory.mktemp("writer")
    shards = lay_out(tensors, shard_bytes)
    values = content(shards)
    made = writer(folder, shards, direct=direct, hold_bytes=hold, threads=threads)
    order = data.draw(st.permutations(sorted(values)))
    for name in order:
        slot, value = made.slots[name], values[name].clone()
        edges = sorted({0, slot.nbytes, *data.draw(st.lists(st.integers(0, slot.nbytes), max_size=2))})
        if data.draw(st.booleans()):
            for start, stop in itertools.pairwise(edges):
                made.put(slot, start, value[start:stop])
        # What was taken is a copy.
        value.zero_()

    fill_gaps(made, values)
    assert list(made.gaps()) == []
    made.settle()
    made.close()

    for shard in shards:
        assert (folder / shard.name).read_bytes() == expected(shard, values)
    assert made.bytes_written == made.bytes_total


@pytest.mark.parametrize(("size", "hold"), [(100, 0), (BLOCK, 1 << 20), (7 * BLOCK, 0), (7 * BLOCK, 1 << 20)])
def test_neighbours_are_put_as_one_or_not_at_all(tmp_path: Path, size: int, hold: int) -> None:
    shards = lay_out({f"t{number}": ("U8", (size,)) for number in range(12)})
    values = content(shards)
    made = writer(tmp_path, shards, hold_bytes=hold)
    slots = list(made.slots.values())
    together = torch.cat([values[slot.name] for slot in slots[2:7]])

    taken = made.put(slots[2], 0, together, behind=slots[3:7])
    together.zero_()

    missing = {slot.name for slot, _, _ in made.gaps()}
    assert missing == {slot.name for slot in slots} - ({slot.name for slot in slots[2:7]} if taken else set())
    assert taken or (size > 100 and not hold)
    fill_gaps(made, values)
    made.settle()
    made.close()
    assert (tmp_path / shards[0].name).read_bytes() == expected(shards[0], values)


def test_a_full_ring_refuses_and_remembers(tmp_path: Path) -> None:
    shards = lay_out({f"t{number}": ("U8", (BLOCK,)) for number in range(12)})
    values = content(shards)
    gate = Gate(tmp_path)
    made = writer(tmp_path, shards, prepare=gate)

    taken = [made.put(slot, 0, values[name]) for name, slot in made.slots.items()]
    gate.open.set()

    assert True in taken
    assert False in taken
    assert len(list(made.gaps())) == taken.count(False)
    assert fill_gaps(made, values) == taken.count(False)
    made.settle()
    made.close()
    assert (tmp_path / shards[0].name).read_bytes() == expected(shards[0], values)


def test_a_large_tensor_is_held_beside_a_full_ring(tmp_path: Path) -> None:
    shards = lay_out({"small": ("U8", (3 * BLOCK,)), "large": ("U8", (20 * BLOCK + 5,)), "second": ("U8", (20 * BLOCK,))})
    values = content(shards)
    gate = Gate(tmp_path)
    made = writer(tmp_path, shards, prepare=gate, hold_bytes=30 * BLOCK)

    assert [made.put(slot, 0, values[name].clone()) for name, slot in made.slots.items()] == [True, True, False]
    gate.open.set()

    assert fill_gaps(made, values) == 1
    made.settle()
    made.close()
    assert (tmp_path / shards[0].name).read_bytes() == expected(shards[0], values)


def test_a_file_system_without_o_direct_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def without(path: str, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more)

    monkeypatch.setattr(direct_target.os, "open", without)
    file = TargetFile(str(tmp_path / "file"), 2 * BLOCK)
    file.write(BLOCK, memoryview(bytes(range(256)) * 16))
    file.settle()

    assert "O_DIRECT" in str(file.fallback_reason)
    assert (tmp_path / "file").read_bytes() == bytes(BLOCK) + bytes(range(256)) * 16


def test_much_that_goes_through_the_page_cache_is_written_out_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(direct_target, "FLUSH_BYTES", 2 * BLOCK)
    monkeypatch.setattr(direct_target.os, "fdatasync", lambda fd: (flushed.append(fd), real(fd)))
    file = TargetFile(str(tmp_path / "file"), 8 * BLOCK, direct=False)

    for number in range(8):
        file.write(number * BLOCK, memoryview(bytes(BLOCK)))
    file.settle()

    assert len(flushed) == 4


def test_a_disk_that_fails_ends_it_and_nothing_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = lay_out({f"t{number}": ("U8", (BLOCK,)) for number in range(40)})
    values = content(shards)
    told: list[BaseException] = []

    def full(_fd: int, _data: memoryview, _offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(direct_target.os, "pwrite", full)
    made = ShardWriter(shards, lambda: str(tmp_path), told.append, Staging(4 * BLOCK, BLOCK))

    refused = [made.put(slot, 0, values[name], wait=True) for name, slot in made.slots.items()]
    with pytest.raises(OSError, match="No space left"):
        made.flush()
    with pytest.raises(OSError, match="No space left"):
        made.settle()
    made.close()
    made.close()

    assert refused[-1] is False
    assert [error.errno for error in told if isinstance(error, OSError)] == [errno.ENOSPC]


def test_a_disk_that_fails_while_a_tensor_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = lay_out({"t": ("U8", (3 * BLOCK,))})
    made = writer(tmp_path, shards, threads=3)
    monkeypatch.setattr(made, "_copy", lambda _at, _view: made._failed(OSError(errno.EIO, "Input/output error")))

    assert not made.put(made.slots["t"], 0, content(shards)["t"])
    with pytest.raises(OSError, match="Input/output error"):
        made.flush()
    made.close()


def test_closing_before_the_end_leaves_what_was_not_written(tmp_path: Path) -> None:
    shards = lay_out({"t": ("U8", (64 * BLOCK,))})
    gate = Gate(tmp_path)
    made = writer(tmp_path, shards, prepare=gate)
    slot = made.slots["t"]
    for start in range(0, slot.nbytes, BLOCK):
        made.put(slot, start, torch.zeros(BLOCK, dtype=torch.uint8))

    gate.open.set()
    made.close()

    assert not made.put(slot, 0, torch.zeros(BLOCK, dtype=torch.uint8))
    assert made.bytes_written < made.bytes_total


# A device. Only what the writer asks of one: whose turn it is there, and when it is done.


class Device:
    """Notes what is done with it, by which thread. busy: an event that passes only when somebody has waited for the stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, busy: bool = False) -> None:
        self.done: list[str] = []
        self.idle = threading.Event()
        self.awaited = threading.Event()
        if not busy:
            self.idle.set()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: self)
        monkeypatch.setattr(torch.cuda, "Stream", lambda _device: self)
        monkeypatch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())

    def synchronize(self) -> None:
        self.done.append("stream")
        self.idle.set()

    def record_event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def synchronize(self) -> None:
        self.device.awaited.set()
        assert self.device.idle.wait(HUNG_S)
        self.device.done.append("event")


class OnDevice(torch.Tensor):
    is_cuda = True  # type: ignore[assignment]


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnDevice)


@pytest.mark.parametrize("sizes", [[100, 200, 300], [BLOCK + 1, BLOCK - 1, 500], [100, 20 * BLOCK]], ids=str)
def test_once_it_has_left_the_device_it_never_goes_back(tmp_path: Path, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole blocks, parts of blocks, both, and a tensor that is held beside the ring: none is written before it leaves, but the last."""
    device = Device(monkeypatch)
    shards = lay_out({f"t{number}": ("U8", (size,)) for number, size in enumerate(sizes)})
    values = content(shards)
    gate = Gate(tmp_path)
    made = writer(tmp_path, shards, blocks=8, prepare=gate, hold_bytes=30 * BLOCK)
    for name, slot in made.slots.items():
        assert made.put(slot, 0, on_device(values[name].clone()))
    if max(sizes) > 4 * BLOCK:
        gate.open.set()  # its copy is on the device, and is waited for

    made.leave_device()
    assert "stream" in device.done
    device.done.clear()
    gate.open.set()

    assert fill_gaps(made, values) == 0
    made.settle()
    made.close()
    assert device.done == []
    assert (tmp_path / shards[0].name).read_bytes() == expected(shards[0], values)


def test_it_has_not_left_while_a_thread_waits_for_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, busy=True)
    shards = lay_out({"t": ("U8", (BLOCK // 2,))})
    values = content(shards)
    made = writer(tmp_path, shards)
    assert made.put(made.slots["t"], 0, on_device(values["t"].clone()))
    assert device.awaited.wait(HUNG_S)

    made.leave_device()

    assert device.done == ["stream", "event"]
    made.settle()
    made.close()
    assert (tmp_path / shards[0].name).read_bytes() == expected(shards[0], values)
