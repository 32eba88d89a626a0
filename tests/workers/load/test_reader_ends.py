"""However a pass ends (an error of the disk, an exception, a close), no thread, file or memory of the reader is left."""

from __future__ import annotations

import errno
import gc
import os
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

import pytest

from sparkd.errors import CheckpointError
from tests.workers.load.shards import KIB, make_reader, open_files, released, ring_bytes_mapped, write_shard
from workers.load import reader as reader_module
from workers.load.reader import ByteRange, ReaderClosed

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_a_disk_error_is_raised_where_it_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_shard(tmp_path, 10 * 4096)
    real = os.preadv

    def broken(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset == 5 * 4096:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    reader = make_reader([ByteRange(n, path, n * 4096, 4096) for n in range(10)], block_bytes=4096)
    seen = []
    with reader:
        with pytest.raises(CheckpointError, match="Input/output error"):
            for chunk in released(reader):
                seen.append(chunk.byte_range.key)
        with pytest.raises(CheckpointError, match="Input/output error"):
            next(reader)
    assert seen == [0, 1, 2, 3, 4]


def test_a_defect_reaches_the_consumer_instead_of_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(os, "preadv", broken)
    with make_reader([ByteRange(0, write_shard(tmp_path, 4096), 0, 4096)]) as reader, pytest.raises(ZeroDivisionError):
        next(reader)


def test_an_error_keeps_no_memory_of_the_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> int:
        del given  # the frame of the real one is no Python frame
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "preadv", broken)
    before = ring_bytes_mapped()
    reader = make_reader([ByteRange(0, write_shard(tmp_path, 4096), 0, 4096)], block_bytes=1 << 20)
    with pytest.raises(CheckpointError) as raised, reader:
        assert ring_bytes_mapped() > before
        next(reader)
    assert traceback.format_exception(raised.value)
    assert ring_bytes_mapped() == before


def test_an_exception_of_the_consumer_ends_everything(tmp_path: Path) -> None:
    path = write_shard(tmp_path, 1 << 20)
    before = ring_bytes_mapped()
    with pytest.raises(KeyError), make_reader([ByteRange(0, path, 0, 1 << 20)], block_bytes=64 * KIB) as reader:
        chunk = next(reader)
        raise KeyError(chunk.start)
    with pytest.raises(ReaderClosed):
        next(reader)
    with pytest.raises(ReaderClosed):
        iter(reader)
    with pytest.raises(ReaderClosed):
        reader.__enter__()
    view = bytes(chunk.view.numpy())
    assert view == Path(path).read_bytes()[: 64 * KIB], "a view that is still held stays valid"
    chunk.release()
    del chunk
    assert ring_bytes_mapped() == before


def test_a_reader_that_never_starts_holds_nothing(tmp_path: Path) -> None:
    reader = make_reader([ByteRange(0, write_shard(tmp_path, 4096), 0, 4096)])
    reader.close()
    reader.close()
    assert reader.stats.bytes_read == 0


def test_close_wakes_a_consumer_that_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on, outcome = threading.Event(), threading.Event(), []

    def slow(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        reading.set()
        go_on.wait()
        return len(buffers[0])

    monkeypatch.setattr(os, "preadv", slow)
    reader = make_reader([ByteRange(0, write_shard(tmp_path, 1 << 20), 0, 1 << 20)])

    def consume() -> None:
        try:
            next(iter(reader))
        except ReaderClosed as closed:
            outcome.append(closed)

    consumer = threading.Thread(target=consume)
    consumer.start()
    reading.wait()
    closer = threading.Thread(target=reader.close)
    closer.start()
    consumer.join()
    assert outcome, "the consumer is told at once, though the disk has not answered"
    go_on.set()
    closer.join()


def test_close_does_not_wait_for_a_dead_disk_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def dead(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        reading.set()
        go_on.wait()
        buffers[0][:] = b"x" * len(buffers[0])
        return len(buffers[0])

    monkeypatch.setattr(os, "preadv", dead)
    monkeypatch.setattr(reader_module, "_JOIN_S", 0.0)
    others = set(threading.enumerate())
    reader = make_reader([ByteRange(0, write_shard(tmp_path, 1 << 20), 0, 1 << 20)], threads=2)
    with reader:
        reading.wait()
    mine = set(threading.enumerate()) - others
    assert mine and all(thread.daemon and thread.name.startswith("stream-read-") for thread in mine)
    go_on.set()
    for thread in mine:
        thread.join()


def test_close_while_every_block_is_held(tmp_path: Path) -> None:
    path = write_shard(tmp_path, 1 << 20)
    with make_reader([ByteRange(0, path, 0, 1 << 20)], block_bytes=4096, blocks=2, threads=4) as reader:
        held = [next(reader), next(reader)]
    for chunk in held:
        chunk.release()


def test_threads_that_cannot_be_started_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, started = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    before = ring_bytes_mapped()
    with pytest.raises(RuntimeError, match="new thread"), make_reader([ByteRange(0, write_shard(tmp_path, 4096), 0, 4096)]):
        pass
    assert ring_bytes_mapped() == before


def test_files_are_closed_as_soon_as_they_are_read(shards: dict[str, bytes]) -> None:
    paths = [path for path, data in shards.items() if data]
    gc.collect()
    fds = open_files()
    reader = make_reader([ByteRange(path, path, 0, 1) for path in paths], threads=1, block_bytes=4096, blocks=2)
    with reader:
        for chunk in released(reader):
            del chunk
        assert open_files() <= fds
