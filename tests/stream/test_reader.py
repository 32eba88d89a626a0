"""Every byte that was asked for, in order, through a bounded ring, whatever the layout, the consumer and the disk do."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import random
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkd.errors import CheckpointError
from workers.stream import reader as reader_module
from workers.stream.reader import Chunk, Piece, Reader, ReaderClosed, RingExhausted

KIB = 1024
SIZES = (0, 1, 4095, 4096, 4097, 3 * 65536, 300_007)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("shards")
    made = {}
    for size in SIZES:
        data = random.Random(size).randbytes(size)
        (folder / f"{size}.bin").write_bytes(data)
        made[str(folder / f"{size}.bin")] = data
    return made


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    fds, threads = _open_files(), set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= threads
    assert _open_files() == fds


def test_the_order_is_the_callers_and_a_key_is_handed_back(shards: dict[str, bytes]) -> None:
    path = _path(shards, 300_007)
    key = object()
    pieces = [Piece(key, path, 200_000, 10), Piece("b", path, 5, 100), Piece(None, path, 100_000, 1)]
    with _reader(pieces) as reader:
        seen = [(chunk.piece, bytes(chunk.view.numpy())) for chunk in _released(reader)]
    assert seen == [(piece, shards[path][piece.offset : piece.offset + piece.nbytes]) for piece in pieces]
    assert seen[0][0].key is key


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_chunks_are_the_files_bytes(shards: dict[str, bytes], data: st.DataObject) -> None:
    """Any offsets, lengths, overlaps, gaps and order over several files, any ring, any number of threads, released late, in any order."""
    pieces = data.draw(st.lists(_piece(shards), max_size=40))
    block_bytes = data.draw(st.integers(1, 16)) * 4 * KIB
    blocks = data.draw(st.integers(2, 8))
    hold = data.draw(st.integers(0, blocks - 1))
    rng = data.draw(st.randoms(use_true_random=False))
    reader = Reader(
        pieces,
        block_bytes=block_bytes,
        blocks=blocks,
        threads=data.draw(st.integers(1, 4)),
        gap_bytes=data.draw(st.sampled_from([0, 1, 4096, 64 * KIB])),
        direct=data.draw(st.sampled_from([None, False])),
        pin=False,
    )
    found: list[bytearray] = []
    held: list[tuple[Chunk, bytes]] = []
    with reader:
        for chunk in reader:
            view, piece = chunk.view, chunk.piece
            assert (view.dtype, view.dim(), view.is_contiguous(), view.device.type) == (torch.uint8, 1, True, "cpu")
            if chunk.start == 0:
                assert piece is pieces[len(found)]
                found.append(bytearray())
            assert len(found[-1]) == chunk.start
            found[-1] += bytes(view.numpy())
            assert chunk.last == (len(found[-1]) == piece.nbytes)
            if view.numel():
                assert (view.data_ptr() - piece.offset - chunk.start) % 4096 == 0
            if piece.nbytes + piece.offset % 4096 <= block_bytes:
                assert chunk.last and chunk.start == 0, "a piece that fits a block is whole"
            held.append((chunk, bytes(view.numpy())))
            while held and reader.held_blocks > hold:
                late, bytes_then = held.pop(rng.randrange(len(held)))
                assert bytes(late.view.numpy()) == bytes_then, "a block was reused under a chunk that was held"
                late.release()
        assert reader.stats.bytes_read == reader.stats.bytes_planned
    assert [bytes(one) for one in found] == [shards[one.path][one.offset : one.offset + one.nbytes] for one in pieces]
    assert reader.stats.bytes_wanted == sum(one.nbytes for one in pieces)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_short_reads_are_continued(shards: dict[str, bytes], data: st.DataObject) -> None:
    """A read may give less than was asked at any time (signals, network file systems), with O_DIRECT in whole aligned blocks."""
    pieces = data.draw(st.lists(_piece(shards), min_size=1, max_size=10))
    seed = data.draw(st.integers(0, 99))
    real = os.preadv

    def short(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        length = max(4096, random.Random(seed + offset).randrange(len(buffers[0])) // 4096 * 4096)
        return real(fd, [buffers[0][:length]], offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", short)
        assert _contents(_reader(pieces, block_bytes=64 * KIB)) == _expected(shards, pieces)


def test_neighbours_share_reads_and_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _file(tmp_path, 4 << 20)
    pieces = [Piece(n, path, 13 + n * 1000, 900) for n in range(2000)]
    reads: list[int] = []
    _count_reads(monkeypatch, reads)
    reader = _reader(pieces, block_bytes=1 << 20)
    _drain(reader)
    assert len(reads) == 2
    assert reader.stats.bytes_read == reader.stats.bytes_planned <= pieces[-1].offset + 900 + 3 * 4096


def test_far_pieces_are_read_alone_and_share_a_block(tmp_path: Path) -> None:
    path = _file(tmp_path, 8 << 20)
    pieces = [Piece(n, path, n << 20, 100) for n in (7, 2, 5, 0)]
    reader = _reader(pieces, blocks=2)
    held = []
    with reader:
        for chunk in reader:
            held.append(chunk)
        assert reader.held_blocks == 1
        assert reader.stats.bytes_read == 4 * 4096
    assert [chunk.piece.key for chunk in held] == [7, 2, 5, 0]


def test_empty_pieces_are_one_empty_chunk_each(shards: dict[str, bytes]) -> None:
    path = _path(shards, 0)
    with _reader([Piece("a", path, 0, 0), Piece("b", path, 0, 0)]) as reader:
        seen = [(chunk.piece.key, chunk.start, chunk.view.numel(), chunk.last) for chunk in _released(reader)]
        assert reader.held_blocks == 0
    assert seen == [("a", 0, 0, True), ("b", 0, 0, True)]
    assert _contents(_reader([])) == []


def test_a_consumer_that_holds_every_block_is_told(tmp_path: Path) -> None:
    path = _file(tmp_path, 1 << 20)
    reader = _reader([Piece(0, path, 0, 1 << 20)], block_bytes=4096, blocks=4)
    held = []
    with reader:
        with pytest.raises(RingExhausted, match="All 4 blocks"):
            for chunk in reader:
                held.append(chunk)
        assert len(held) == reader.held_blocks == 4
        assert reader.stats.bytes_read == reader.ring_bytes, "nothing is read that has no place"
        held.pop(2).release()
        held.append(next(reader))
        assert held[-1].start == 4 * 4096
        with pytest.raises(RingExhausted):
            next(reader)


def test_releasing_twice_gives_one_block_back(tmp_path: Path) -> None:
    path = _file(tmp_path, 1 << 20)
    with _reader([Piece(n, path, n * 2048, 2048) for n in range(8)], block_bytes=4096, blocks=2) as reader:
        first, second = next(reader), next(reader)
        first.release()
        first.release()
        assert reader.held_blocks == 1
        second.release()
        assert reader.held_blocks == 0


def test_another_thread_may_release(tmp_path: Path) -> None:
    path = _file(tmp_path, 1 << 20)
    handed: deque[Chunk] = deque()
    something, ended = threading.Semaphore(0), threading.Event()

    def give_back() -> None:
        while something.acquire() and not ended.is_set():
            handed.popleft().release()

    thread = threading.Thread(target=give_back)
    thread.start()
    with _reader([Piece(0, path, 0, 1 << 20)], block_bytes=4096, blocks=2, releases_elsewhere=True) as reader:
        for chunk in reader:
            handed.append(chunk)
            something.release()
    ended.set()
    something.release()
    thread.join()
    assert reader.stats.bytes_read == 1 << 20


def test_a_missing_file_is_named_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: the file is missing\. Download it again\.$") as raised:
        _reader([Piece(0, str(tmp_path / "gone.safetensors"), 0, 1)])
    assert raised.value.file == str(tmp_path / "gone.safetensors")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a regular file"):
        _reader([Piece(0, str(tmp_path), 0, 1)])


def test_a_file_that_ends_too_early_is_named_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"shard\.bin: the file ends at byte 5000, before byte 5001\. Download it again\."):
        _reader([Piece(0, _file(tmp_path, 5000), 4000, 1001)])


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("left", [0, 1, 4096, 9000, 61440])
def test_a_file_that_is_cut_later_fails_where_its_bytes_are_due(tmp_path: Path, direct: bool | None, left: int) -> None:
    path = _file(tmp_path, 100_000)
    reader = _reader([Piece(n, path, n * 20_000, 20_000) for n in range(5)], block_bytes=20_480 + 4096, direct=direct)
    os.truncate(path, left)
    whole = 0
    with reader, pytest.raises(CheckpointError, match=rf"shard\.bin: the file ends at byte {left}, before byte [0-9]+\."):
        for chunk in _released(reader):
            whole += chunk.last
    assert whole == left // 20_000


@pytest.mark.parametrize(
    ("number", "says"),
    [(errno.EIO, r"cannot be read: Input/output error\. Look for disk errors"), (errno.ESTALE, "cannot be read: Stale file handle")],
)
def test_a_disk_error_is_raised_where_it_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, says: str) -> None:
    path = _file(tmp_path, 10 * 4096)
    real = os.preadv

    def broken(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset == 5 * 4096:
            raise OSError(number, os.strerror(number))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    reader = _reader([Piece(n, path, n * 4096, 4096) for n in range(10)], block_bytes=4096)
    seen = []
    with reader:
        with pytest.raises(CheckpointError, match=says):
            for chunk in _released(reader):
                seen.append(chunk.piece.key)
        with pytest.raises(CheckpointError, match=says):
            next(reader)
    assert seen == [0, 1, 2, 3, 4]


def test_a_defect_reaches_the_consumer_instead_of_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(os, "preadv", broken)
    with _reader([Piece(0, _file(tmp_path, 4096), 0, 4096)]) as reader, pytest.raises(ZeroDivisionError):
        next(reader)


def test_an_error_keeps_no_memory_of_the_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> int:
        del given  # the frame of the real one is no Python frame
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "preadv", broken)
    before = _mappings()
    reader = _reader([Piece(0, _file(tmp_path, 4096), 0, 4096)], block_bytes=1 << 20)
    with pytest.raises(CheckpointError) as raised, reader:
        assert _mappings() > before
        next(reader)
    assert traceback.format_exception(raised.value)
    assert _mappings() == before


def test_an_exception_of_the_consumer_ends_everything(tmp_path: Path) -> None:
    path = _file(tmp_path, 1 << 20)
    before = _mappings()
    with pytest.raises(KeyError), _reader([Piece(0, path, 0, 1 << 20)], block_bytes=64 * KIB) as reader:
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
    assert _mappings() == before


def test_a_reader_that_never_starts_holds_nothing(tmp_path: Path) -> None:
    reader = _reader([Piece(0, _file(tmp_path, 4096), 0, 4096)])
    reader.close()
    reader.close()
    assert reader.stats.seconds == 0.0


def test_close_wakes_a_consumer_that_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on, outcome = threading.Event(), threading.Event(), []

    def slow(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        reading.set()
        go_on.wait()
        return len(buffers[0])

    monkeypatch.setattr(os, "preadv", slow)
    reader = _reader([Piece(0, _file(tmp_path, 1 << 20), 0, 1 << 20)])

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
    reader = _reader([Piece(0, _file(tmp_path, 1 << 20), 0, 1 << 20)], threads=2)
    with reader:
        reading.wait()
    mine = set(threading.enumerate()) - others
    assert mine and all(thread.daemon and thread.name.startswith("stream-read-") for thread in mine)
    go_on.set()
    for thread in mine:
        thread.join()


def test_close_while_every_block_is_held(tmp_path: Path) -> None:
    path = _file(tmp_path, 1 << 20)
    with _reader([Piece(0, path, 0, 1 << 20)], block_bytes=4096, blocks=2, threads=4) as reader:
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
    before = _mappings()
    with pytest.raises(RuntimeError, match="new thread"), _reader([Piece(0, _file(tmp_path, 4096), 0, 4096)]):
        pass
    assert _mappings() == before


def test_files_are_closed_as_soon_as_they_are_read(shards: dict[str, bytes]) -> None:
    paths = [path for path, data in shards.items() if data]
    fds = _open_files()
    reader = _reader([Piece(path, path, 0, 1) for path in paths], threads=1, block_bytes=4096, blocks=2)
    with reader:
        for chunk in _released(reader):
            del chunk
        assert _open_files() == fds


def test_nothing_stays_in_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _file(tmp_path, (5 << 20) + 123)
    pieces = [Piece(n, path, n * 700_000 + 1, 650_000) for n in range(7)]
    before = _cached_pages(path)
    reader = _reader(pieces, block_bytes=256 * KIB)
    _drain(reader)
    assert _cached_pages(path) <= before
    forced = _reader(pieces, block_bytes=256 * KIB, direct=False)
    _drain(forced)
    assert _cached_pages(path) <= before
    assert not forced.stats.direct
    assert forced.stats.fallback_reason is not None
    assert forced.stats.fallback_reason.startswith(f"{path} is read through the page cache")


@pytest.mark.parametrize("where", ["open", "first read", "second read"])
def test_a_file_system_without_o_direct(shards: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Only the file that needs it is read through the page cache."""
    stubborn, other = _path(shards, 300_007), _path(shards, 3 * 65536)
    _refuse_direct(monkeypatch, stubborn, where)
    pieces = [Piece(0, other, 0, 150_000), Piece(1, stubborn, 7, 250_000), Piece(2, other, 150_000, 10)]
    reader = _reader(pieces, block_bytes=32 * KIB)
    assert _contents(reader) == _expected(shards, pieces)
    assert not reader.stats.direct
    assert reader.stats.fallback_reason is not None
    assert stubborn in reader.stats.fallback_reason
    assert other not in reader.stats.fallback_reason


@pytest.mark.parametrize("where", ["open", "first read"])
def test_direct_reads_that_were_demanded(shards: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    path = _path(shards, 300_007)
    _refuse_direct(monkeypatch, path, where)
    with (
        _reader([Piece(0, path, 0, 9)], direct=True) as reader,
        pytest.raises(CheckpointError, match=r"O_DIRECT was asked for, but .*\. Put the checkpoint on a local ext4 or xfs"),
    ):
        next(reader)


def test_several_fallbacks_are_one_sentence_each(shards: dict[str, bytes]) -> None:
    paths = [path for path, data in shards.items() if data]
    reader = _reader([Piece(0, path, 0, 1) for path in paths], direct=False)
    _drain(reader)
    assert reader.stats.fallback_reason == (
        f"{paths[0]} is read through the page cache, which is dropped behind every block: it was asked for."
        f" So are {len(paths) - 1} more files."
    )


def test_memory_file_systems(shards: dict[str, bytes]) -> None:
    """tmpfs has no O_DIRECT before Linux 6.6, and reads through its own memory since."""
    path = Path("/dev/shm") / f"sparkd-test-{os.getpid()}"
    data = shards[_path(shards, 300_007)]
    try:
        path.write_bytes(data)
        assert _contents(_reader([Piece(0, str(path), 3, 300_000)], block_bytes=8 * KIB)) == [data[3:300_003]]
    finally:
        path.unlink()


def test_a_file_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _file(tmp_path, 4096)
    real = os.open

    def denied(name: str, flags: int) -> int:
        if name == path:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(name, flags)

    reader = _reader([Piece(0, path, 0, 1)])
    monkeypatch.setattr(os, "open", denied)
    with reader, pytest.raises(CheckpointError, match=r"permission denied\. Make it readable"):
        next(reader)


@pytest.mark.parametrize(
    "wrong", [{"block_bytes": 0}, {"block_bytes": 5000}, {"blocks": 1}, {"threads": 0}, {"block_bytes": -4096}, {"blocks": 0}]
)
def test_a_ring_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="A ring needs two blocks"):
        _reader([], **wrong)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 5), (0, -1), (5, -5)])
def test_a_piece_that_cannot_be(tmp_path: Path, offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="negative"):
        _reader([Piece(0, _file(tmp_path, 100), offset, nbytes)])


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

    def cudaGetErrorString(self, result: int) -> str:
        return f"error {result}"


@pytest.mark.parametrize(("result", "reason", "calls"), [(0, None, 3), (2, "cudaHostRegister failed: error 2", 1)])
def test_the_ring_is_pinned_as_one_and_unpinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: int, reason: str | None, calls: int
) -> None:
    runtime = FakeRuntime(result)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: runtime.calls.append(("synchronize", 0)))
    reader = _reader([Piece(0, _file(tmp_path, 4096), 0, 4096)], pin=True)
    _drain(reader)
    assert reader.stats.unpinned_reason == reason
    assert runtime.calls == [("register", reader.ring_bytes), ("synchronize", 0), ("unregister", 0)][:calls]


def test_without_cuda_the_ring_is_not_pinned_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reader = _reader([Piece(0, _file(tmp_path, 4096), 0, 4096)], pin=True)
    _drain(reader)
    assert reader.stats.unpinned_reason == "there is no CUDA device"


def test_under_another_default_device(shards: dict[str, bytes]) -> None:
    """vLLM loads weights inside a `with device:`."""
    path = _path(shards, 4097)
    with torch.device("meta"):
        assert _contents(_reader([Piece(0, path, 0, 4097)])) == [shards[path]]


def _piece(shards: dict[str, bytes]) -> st.SearchStrategy[Piece]:
    def ranges(path: str) -> st.SearchStrategy[Piece]:
        size = len(shards[path])
        near = st.sampled_from(sorted({min(size, edge) for edge in (0, 1, 4095, 4096, 4097, 8192, 65536, 65537, size)}))
        edge = st.one_of(near, st.integers(0, size))
        small = st.builds(lambda begin, more: (begin, min(size, begin + more)), edge, st.integers(0, 5000))
        return st.one_of(st.tuples(edge, edge), small).map(lambda two: Piece(None, path, min(two), abs(two[1] - two[0])))

    return st.sampled_from(sorted(shards)).flatmap(ranges)


def _reader(pieces: Sequence[Piece], **options: Any) -> Reader:
    return Reader(pieces, **{"block_bytes": 64 * KIB, "blocks": 4, "threads": 3, "pin": False, **options})


def _released(reader: Reader) -> Iterator[Chunk]:
    for chunk in reader:
        yield chunk
        chunk.release()


def _drain(reader: Reader) -> None:
    with reader:
        for _ in _released(reader):
            pass


def _contents(reader: Reader) -> list[bytes]:
    found: list[bytearray] = []
    with reader:
        for chunk in _released(reader):
            if chunk.start == 0:
                found.append(bytearray())
            found[-1] += bytes(chunk.view.numpy())
    return [bytes(one) for one in found]


def _expected(shards: dict[str, bytes], pieces: Sequence[Piece]) -> list[bytes]:
    return [shards[one.path][one.offset : one.offset + one.nbytes] for one in pieces]


def _path(shards: dict[str, bytes], size: int) -> str:
    return next(path for path, data in shards.items() if len(data) == size)


def _file(folder: Path, size: int) -> str:
    """Written through, and out of the page cache."""
    path = folder / "shard.bin"
    path.write_bytes(random.Random(size).randbytes(size))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    return str(path)


def _count_reads(patch: pytest.MonkeyPatch, lengths: list[int]) -> None:
    real = os.preadv

    def counted(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        lengths.append(len(buffers[0]))
        return real(fd, buffers, offset)

    patch.setattr(os, "preadv", counted)


def _refuse_direct(patch: pytest.MonkeyPatch, path: str, where: str) -> None:
    """A file system that says EINVAL to O_DIRECT for this file when it is opened, or at one of its reads."""
    real_open, real_preadv = os.open, os.preadv
    direct: set[int] = set()
    reads = 0

    def open_file(name: str, flags: int) -> int:
        if name == path and flags & os.O_DIRECT and where == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = real_open(name, flags)
        if name == path and flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal reads
        if fd in direct and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            reads += 1
            if where == "first read" or reads > 1:
                raise OSError(errno.EINVAL, "Invalid argument")
        return real_preadv(fd, buffers, offset)

    patch.setattr(os, "open", open_file)
    patch.setattr(os, "preadv", preadv)


def _cached_pages(path: str) -> int:
    """Pages of the file that the page cache holds: mincore(2)."""
    size = os.path.getsize(path)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        held = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        whole = (ctypes.c_char * size).from_buffer(mapped)
        assert ctypes.CDLL(None).mincore(ctypes.byref(whole), ctypes.c_size_t(size), held) == 0
        del whole
        return sum(page & 1 for page in held)


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _mappings() -> int:
    """Bytes that this process has mapped without inheritance to children (madvise MADV_DONTFORK), as the ring is."""
    gc.collect()
    found, size = 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Size:"):
            size = int(line.split()[1]) * KIB
        elif line.startswith("VmFlags:") and " dc" in line:
            found += size
    return found
