"""Files as they are found: past the page cache, through it where there is no other way, missing, too short or unreadable."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from sparkd.errors import CheckpointError
from tests.support.facts import lacking
from tests.support.waiting import HUNG_S, until
from tests.workers.load.shards import (
    KIB,
    cached_pages,
    contents,
    drain,
    expected,
    make_reader,
    released,
    shard_of,
    write_shard,
)
from workers.files import direct_file
from workers.files.direct_file import ALIGNMENT, FLUSH_BYTES, DirectFile
from workers.load.reader import ByteRange

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_a_file_that_cannot_be_read_is_named_before_anything_is_read(tmp_path: Path) -> None:
    """One that is missing, a folder, and one that ends too early."""
    for path in (tmp_path / "gone.safetensors", tmp_path):
        with pytest.raises(CheckpointError) as raised:
            make_reader([ByteRange(0, str(path), 0, 1)])
        assert raised.value.file == str(path)
    with pytest.raises(CheckpointError, match=r"shard\.bin: .* 5000, .* 5001\."):
        make_reader([ByteRange(0, write_shard(tmp_path, 5000), 4000, 1001)])


@pytest.mark.parametrize(("past_cache", "left"), [(True, 0), (True, 9000), (True, 61440), (False, 4096), (False, 61440)])
def test_a_file_that_is_cut_later_fails_where_its_bytes_are_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, past_cache: bool, left: int
) -> None:
    path = write_shard(tmp_path, 100_000)
    if not past_cache:
        _refuse_direct(monkeypatch, path, "open")
    reader = make_reader([ByteRange(n, path, n * 20_000, 20_000) for n in range(5)], block_bytes=20_480 + 4096)
    os.truncate(path, left)
    whole = 0
    with reader, pytest.raises(CheckpointError, match=rf"shard\.bin: .* {left}, .* [0-9]+\."):
        for chunk in released(reader):
            whole += chunk.last
    assert whole == left // 20_000


def test_a_file_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_shard(tmp_path, 4096)
    real = os.open

    def denied(name: str, flags: int, mode: int) -> int:
        if name == path:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(name, flags, mode)

    reader = make_reader([ByteRange(0, path, 0, 1)])
    monkeypatch.setattr(os, "open", denied)
    with reader, pytest.raises(CheckpointError) as raised:
        next(iter(reader))
    assert raised.value.file == path


def test_nothing_stays_in_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_shard(tmp_path, (5 << 20) + 123)
    ranges = [ByteRange(n, path, n * 700_000 + 1, 650_000) for n in range(7)]
    before = cached_pages(path)
    reader = make_reader(ranges, block_bytes=256 * KIB)
    drain(reader)
    assert cached_pages(path) <= before
    _refuse_direct(monkeypatch, path, "open")
    forced = make_reader(ranges, block_bytes=256 * KIB)
    drain(forced)
    assert cached_pages(path) <= before
    assert not forced.stats.direct
    assert forced.stats.fallback_reason is not None
    assert lacking(forced.stats.fallback_reason, path) == []


@pytest.mark.parametrize("where", ["open", "second read"])
def test_a_file_system_without_o_direct(shards: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Only the file that needs it is read through the page cache."""
    stubborn, other = shard_of(shards, 300_007), shard_of(shards, 3 * 65536)
    _refuse_direct(monkeypatch, stubborn, where)
    ranges = [ByteRange(0, other, 0, 150_000), ByteRange(1, stubborn, 7, 250_000), ByteRange(2, other, 150_000, 10)]
    reader = make_reader(ranges, block_bytes=32 * KIB)
    assert contents(reader) == expected(shards, ranges)
    assert not reader.stats.direct
    assert reader.stats.fallback_reason is not None
    assert stubborn in reader.stats.fallback_reason
    assert other not in reader.stats.fallback_reason


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_refusal_to_two_threads_at_once_ends_neither(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FUSE and network file systems open a file with O_DIRECT and refuse the first read or write; both threads are in it then."""
    data, both, real = os.urandom(2 * FLUSH_BYTES), threading.Barrier(2), getattr(os, call)
    path = tmp_path / "file"
    path.write_bytes(data if call == "preadv" else b"")
    file = DirectFile(path, size_bytes=len(data) if call == "pwritev" else None)
    returned: dict[int, bytes] = {}

    def refusing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            if both.wait(HUNG_S):  # the second hears of it once the first has given O_DIRECT up
                until(lambda: not file.direct, "the first goes through the page cache")
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return int(real(fd, buffers, offset))

    def work(offset: int) -> None:
        view = memoryview(mmap.mmap(-1, FLUSH_BYTES))
        if call == "pwritev":
            view[:] = data[offset : offset + FLUSH_BYTES]
            file.write(offset, view)
        else:
            file.read(view, offset, FLUSH_BYTES)
        returned[offset] = bytes(view)

    monkeypatch.setattr(os, call, refusing)
    threads = [threading.Thread(target=work, args=(offset,)) for offset in (0, FLUSH_BYTES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()

    assert not file.direct
    assert returned[0] + returned[FLUSH_BYTES] == path.read_bytes() == data


def test_what_cannot_be_written_past_the_page_cache_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "file")
    _refuse_direct(monkeypatch, path, "open")
    file = DirectFile(path, size_bytes=2 * ALIGNMENT)
    file.write(ALIGNMENT, memoryview(bytes(range(256)) * 16))
    file.settle()

    assert "O_DIRECT" in str(file.fallback_reason)
    assert Path(path).read_bytes() == bytes(ALIGNMENT) + bytes(range(256)) * 16


def test_much_that_goes_through_the_page_cache_is_written_out_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(direct_file, "FLUSH_BYTES", 2 * ALIGNMENT)
    monkeypatch.setattr(os, "fdatasync", lambda fd: (flushed.append(fd), real(fd)))
    _refuse_direct(monkeypatch, str(tmp_path / "file"), "open")
    file = DirectFile(tmp_path / "file", size_bytes=8 * ALIGNMENT)

    for number in range(8):
        file.write(number * ALIGNMENT, memoryview(bytes(ALIGNMENT)))
    file.settle()

    assert len(flushed) == 4


def test_a_file_has_its_size_at_once_and_space_where_that_is_asked_for(tmp_path: Path) -> None:
    """Also one that a copy of an earlier release left, which was longer."""
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * ALIGNMENT))
    with closing(DirectFile(path, size_bytes=ALIGNMENT + 7)):
        assert path.stat().st_size == ALIGNMENT + 7
    with closing(DirectFile(tmp_path / "other", size_bytes=ALIGNMENT + 7)) as other:
        other.reserve()
        assert os.stat(other.path).st_blocks * 512 >= ALIGNMENT + 7


def test_memory_file_systems(shards: dict[str, bytes]) -> None:
    """tmpfs has no O_DIRECT before Linux 6.6, and reads through its own memory since."""
    path = Path("/dev/shm") / f"sparkd-test-{os.getpid()}"
    data = shards[shard_of(shards, 300_007)]
    try:
        path.write_bytes(data)
        assert contents(make_reader([ByteRange(0, str(path), 3, 300_000)], block_bytes=8 * KIB)) == [data[3:300_003]]
    finally:
        path.unlink()


def _refuse_direct(patch: pytest.MonkeyPatch, path: str, where: str) -> None:
    """A file system that says EINVAL to O_DIRECT for this file when it is opened, or at one of its reads."""
    real_open, real_preadv = os.open, os.preadv
    fds: set[int] = set()
    reads = 0

    def open_file(name: str, flags: int, mode: int) -> int:
        if name == path and flags & os.O_DIRECT and where == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = real_open(name, flags, mode)
        if name == path and flags & os.O_DIRECT:
            fds.add(fd)
        return fd

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal reads
        if fd in fds and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            reads += 1
            if reads > 1:
                raise OSError(errno.EINVAL, "Invalid argument")
        return real_preadv(fd, buffers, offset)

    patch.setattr(os, "open", open_file)
    patch.setattr(os, "preadv", preadv)
