"""However a pass ends (an error of the disk, an exception, a close), no thread, file or memory of the reader is left."""

from __future__ import annotations

import errno
import os
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

import pytest

from sparkd.errors import CheckpointError
from tests.workers.load.shards import KIB, make_reader, released, ring_bytes_mapped, write_shard
from workers.load import reader as reader_module
from workers.load.reader import ByteRange

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
    with reader, pytest.raises(CheckpointError, match="Input/output error"):
        for chunk in released(reader):
            seen.append(chunk.byte_range.key)
    assert seen == [0, 1, 2, 3, 4]


def test_a_defect_reaches_the_consumer_instead_of_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(os, "preadv", broken)
    with make_reader([ByteRange(0, write_shard(tmp_path, 4096), 0, 4096)]) as reader, pytest.raises(ZeroDivisionError):
        next(iter(reader))


def test_an_error_keeps_no_memory_of_the_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> int:
        del given  # the frame of the real one is no Python frame
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "preadv", broken)
    before = ring_bytes_mapped()
    reader = make_reader([ByteRange(0, write_shard(tmp_path, 4096), 0, 4096)], block_bytes=1 << 20)
    with pytest.raises(CheckpointError) as raised, reader:
        assert ring_bytes_mapped() > before
        next(iter(reader))
    assert traceback.format_exception(raised.value)
    assert ring_bytes_mapped() == before


def test_an_exception_of_the_consumer_ends_everything(tmp_path: Path) -> None:
    path = write_shard(tmp_path, 1 << 20)
    before = ring_bytes_mapped()
    with pytest.raises(KeyError), make_reader([ByteRange(0, path, 0, 1 << 20)], block_bytes=64 * KIB) as reader:
        chunk = next(iter(reader))
        raise KeyError(chunk.start)
    view = bytes(chunk.view.numpy())
    assert view == Path(path).read_bytes()[: 64 * KIB], "a view that is still held stays valid"
    chunk.release()
    del chunk
    assert ring_bytes_mapped() == before


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
    for file in reader._files.values():  # a thread may have been in it: the process's end closes it
        file.close()


def test_close_while_every_block_is_held(tmp_path: Path) -> None:
    path = write_shard(tmp_path, 1 << 20)
    with make_reader([ByteRange(0, path, 0, 1 << 20)], block_bytes=4096, blocks=2, threads=4) as reader:
        chunks = iter(reader)
        held = [next(chunks), next(chunks)]
    for chunk in held:
        chunk.release()
