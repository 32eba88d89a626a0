"""The feed's two lanes on a device that does what it is asked when it likes, and only what the streams' own order forbids not: buffers that
take turns, blocks of the ring that go back, errors and cancelling. A real reader and its ring; the device is made here.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from sparkd.errors import CheckpointError
from workers.load import device_feed as module
from workers.load.device_feed import DeviceFeed
from workers.load.read_plan import TensorRead
from workers.load.reader import ByteRange, Reader

CPU = torch.device("cpu")
BLOCK = 4096


class Device:
    """Streams of things to do, each in its own order. order: which stream goes on first where several can."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
        self.main, self.asides = Stream("main"), list[Stream]()
        self._current = self.main
        self._random = random.Random(order)
        self._order = order
        OnDevice.device_of_all = self
        monkeypatch.setattr(torch.cuda, "Event", lambda: Event(self))
        monkeypatch.setattr(torch.cuda, "Stream", self._another)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: self._current)
        monkeypatch.setattr(torch.cuda, "stream", self._on)

    def ask(self, do: Callable[[], object]) -> None:
        """Of the current stream."""
        self._current.asked.append(do)

    @property
    def is_on_main(self) -> bool:
        return self._current is self.main

    def run(self, until: Callable[[], bool] = lambda: False, *, steps: int = 10**9) -> None:
        """Until then, or until nothing can go on."""
        streams = [self.main, *self.asides]
        for _ in range(steps):
            ready = [stream for stream in streams if stream.can_go_on()]
            if until() or not ready:
                return
            preferred = [one for one in ready if one.name == self._order]
            (preferred or ([self._random.choice(ready)] if self._order not in ("main", "aside") else ready))[0].go_on()

    def _another(self, _device: torch.device) -> Stream:
        self.asides.append(Stream("aside"))
        return self.asides[-1]

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def record(self, event: Event) -> None:
        event.is_recorded = True
        self.ask(event.passed)


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: deque[Any] = deque()

    def can_go_on(self) -> bool:
        while self.asked and isinstance(self.asked[0], Event) and self.asked[0].has_passed:
            self.asked.popleft()
        return bool(self.asked) and not isinstance(self.asked[0], Event)

    def go_on(self) -> None:
        self.asked.popleft()()

    def wait_event(self, event: Event) -> None:
        self.asked.append(event)

    def wait_stream(self, other: Stream) -> None:
        event = Event(None)
        other.asked.append(event.passed)
        self.wait_event(event)


class Event:
    def __init__(self, device: Device | None) -> None:
        self._device = device
        self.has_passed = self.is_recorded = False

    def passed(self) -> None:
        self.has_passed = True

    def record(self) -> None:
        assert self._device is not None
        self._device.record(self)

    def query(self) -> bool:
        assert self._device is not None
        self._device.run(steps=1)
        return self.has_passed

    def synchronize(self) -> None:
        assert self._device is not None
        assert self.is_recorded
        self._device.run(lambda: self.has_passed)
        assert self.has_passed, "nothing can go on: the streams wait for each other"


class OnDevice(torch.Tensor):
    """A view of the ring, which is copied from when the device gets there."""

    device_of_all: ClassVar[Device]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if function is not torch.Tensor.copy_:
            return super().__torch_function__(function, types, args, kwargs or {})
        into, view = args[0].as_subclass(torch.Tensor), args[1].as_subclass(torch.Tensor)
        cls.device_of_all.ask(lambda: into.copy_(view))
        return args[0]


class Ringed:
    """A reader whose chunks are on their way to a device."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.blocks = reader.blocks

    @property
    def held_blocks(self) -> int:
        return self._reader.held_blocks

    def __iter__(self) -> Iterator[Any]:
        for chunk in self._reader:
            chunk.view = chunk.view.as_subclass(OnDevice)
            yield chunk


def reads_of(folder: Path, sizes: Sequence[int]) -> tuple[list[TensorRead], list[bytes]]:
    data = random.Random(3).randbytes(sum(sizes))
    path = folder / "file"
    path.write_bytes(data)
    made, at = [], 0
    for number, size in enumerate(sizes):
        made.append(TensorRead((ByteRange(number, str(path), at, size),), size))
        at += size
    return made, [data[one.ranges[0].offset :][: one.nbytes] for one in made]


@contextlib.contextmanager
def fed(device: Device, sources: Sequence[TensorRead], blocks: int = 4) -> Iterator[DeviceFeed]:
    ranges = [byte_range for source in sources for byte_range in source.ranges]
    with Reader(ranges, block_bytes=BLOCK, blocks=blocks, threads=2, pin=False) as reader:
        made = DeviceFeed(Ringed(reader), CPU)  # type: ignore[arg-type]
        made._cuda = True
        yield made


SIZES = [3000, 9000, 100, 1, 12000, 5000, 700, 8192, 4096, 33, 20000, 64]
ORDERS = ["main", "aside", *(f"chance {seed}" for seed in range(3))]


def worked_off(feed: DeviceFeed, device: Device, sources: Sequence[TensorRead]) -> list[torch.Tensor]:
    """Batches of two, straight placing, single tensors and tensors part by part in turn; what a kernel on the main stream sees of each."""
    seen = [torch.zeros(source.nbytes, dtype=torch.uint8) for source in sources]

    def kernel(number: int, memory: torch.Tensor) -> None:
        device.ask(lambda: seen[number].copy_(memory))

    for start in range(0, len(sources), 6):
        first, second, third, fourth, fifth, sixth = enumerate(sources[start : start + 6], start)
        for batch in ((first, second), (third, fourth)):
            offsets = (0, batch[0][1].nbytes)
            with feed.staged(
                [(one, at) for (_, one), at in zip(batch, offsets, strict=True)], sum(one.nbytes for _, one in batch)
            ) as memory:
                for (number, one), at in zip(batch, offsets, strict=True):
                    kernel(number, memory[at : at + one.nbytes])
        parameter = torch.zeros(fifth[1].nbytes, dtype=torch.uint8)
        feed.place(fifth[1], parameter)
        kernel(fifth[0], parameter)
        if start == 6:
            kernel(sixth[0], feed.take(sixth[1], keep=True))
            continue
        parts = torch.zeros(sixth[1].nbytes, dtype=torch.uint8)
        at = 0
        for part in feed.views(sixth[1]):
            parts[at : at + part.numel()].copy_(part, non_blocking=True)
            at += part.numel()
        kernel(sixth[0], parts)
    return seen


@pytest.mark.parametrize(("sizes", "blocks"), [(SIZES, 2), (SIZES, 16), ([3000] * 18, 4)], ids=["a small ring", "a large ring", "one size"])
@pytest.mark.parametrize("order", ORDERS)
def test_whichever_lane_is_ahead_every_byte_arrives(
    tmp_path: Path, order: str, blocks: int, sizes: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch, order)
    sources, wanted = reads_of(tmp_path, sizes)
    with fed(device, sources, blocks) as feed:
        seen = worked_off(feed, device, sources)
        feed.finish()
        assert feed._reader.held_blocks == 0, "after the last copies the ring may go"
    device.run()

    assert device.is_on_main
    assert len(device.asides) == 1
    assert [bytes(one.numpy()) for one in seen] == wanted


@pytest.mark.parametrize("forgotten", ["wait_event", "wait_stream"])
def test_the_device_here_shows_a_wait_that_is_forgotten(tmp_path: Path, forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the buffers' turns, and of the main stream for what was copied beside it."""
    device = Device(monkeypatch, "aside" if forgotten == "wait_event" else "main")
    sources, wanted = reads_of(tmp_path, SIZES)
    monkeypatch.setattr(Stream, forgotten, lambda _self, _other: None)
    with fed(device, sources, 16) as feed:
        seen = worked_off(feed, device, sources)
        feed.finish()
    device.run()

    assert [bytes(one.numpy()) for one in seen] != wanted


def test_two_buffers_take_turns_and_the_host_waits_for_no_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, "aside")
    sources, wanted = reads_of(tmp_path, [4000] * 5)
    places, seen, waited = [], [], []
    synchronize = Event.synchronize
    monkeypatch.setattr(Event, "synchronize", lambda event: waited.append(event) or synchronize(event))
    with fed(device, sources, 16) as feed:
        for source in sources:
            with feed.staged([(source, 0)], source.nbytes) as memory:
                places.append(memory.data_ptr())
                device.ask(lambda memory=memory: seen.append(bytes(memory.numpy())))
        assert waited == []
        feed.finish()
    device.run()

    assert len(set(places)) == 2
    assert places == [*places[:2], *places[:2], places[0]]
    assert seen == wanted


def test_a_larger_buffer_waits_for_all_that_the_main_stream_has_been_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch hands out memory again whose last use is still queued on the stream that it was allocated for."""
    device = Device(monkeypatch, "aside")
    sources, _ = reads_of(tmp_path, [100, 100, 4000])
    done: list[int] = []
    with fed(device, sources, 16) as feed:
        for number, source in enumerate(sources):
            device.ask(lambda number=number: done.append(number))
            with feed.staged([(source, 0)], source.nbytes) as memory:
                device.asides[0].asked.append(lambda number=number: done.append(10 + number))
            assert memory.numel() == source.nbytes
        feed.finish()
        device.run()

    assert done.index(12) > done.index(2)


class Broken(Exception):
    pass


@pytest.mark.parametrize("order", ORDERS[:3])
@pytest.mark.parametrize("lane", ["aside", "main"])
def test_an_error_in_a_lane_is_raised_as_it_is_and_spoils_nothing(
    tmp_path: Path, lane: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that ends in the middle of what is copied; whatever came before it is right."""
    device = Device(monkeypatch, order)
    sources, wanted = reads_of(tmp_path, [5000, 6000, 30000])
    with fed(device, sources) as feed:
        os.truncate(sources[0].ranges[0].path, 20000)  # behind all that the ring can hold
        seen = []
        with pytest.raises(CheckpointError, match=" 20000,"):
            for number, source in enumerate(sources):
                if lane == "main":
                    taken = feed.take(source, keep=True)
                    device.ask(lambda taken=taken: seen.append(bytes(taken.numpy())))
                    continue
                with feed.staged([(source, 0)], source.nbytes) as memory:
                    assert number < 2
                    device.ask(lambda memory=memory: seen.append(bytes(memory.numpy())))
        assert device.is_on_main
        device.run()  # as the ring does when it is closed: it waits for the device
    assert seen == wanted[: len(seen)]


@pytest.mark.parametrize("order", ORDERS[:3])
@pytest.mark.parametrize(("at", "how"), [(0, GeneratorExit), (1, KeyboardInterrupt), (2, Broken)])
def test_a_load_that_is_cancelled_between_the_lanes_ends_at_once(
    tmp_path: Path, at: int, how: type[BaseException], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch, order)
    sources, wanted = reads_of(tmp_path, [9000] * 3)
    seen = []
    with pytest.raises(how), fed(device, sources) as feed:
        for number, source in enumerate(sources):
            with feed.staged([(source, 0)], source.nbytes) as memory:
                device.ask(lambda memory=memory: seen.append(bytes(memory.numpy())))
                if number == at:
                    device.run()
                    raise how
    assert device.is_on_main
    assert seen == wanted[: at + 1]


def test_an_event_stands_behind_many_small_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Event] = []
    device = Device(monkeypatch, "main")
    monkeypatch.setattr(torch.cuda, "Event", lambda: made.append(Event(device)) or made[-1])
    monkeypatch.setattr(module, "EVENT_CHUNKS", 64)
    sources, wanted = reads_of(tmp_path, [16] * 200)
    with fed(device, sources, 16) as feed:
        seen = [feed.take(source, keep=True) for source in sources]
        assert len(made) == 3
        feed.finish()
        assert len(made) == 4
    assert [bytes(one.numpy()) for one in seen] == wanted
