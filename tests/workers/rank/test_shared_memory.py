"""Shared memory that an engine leaves behind: what is surely a dead rank's is removed, what may be its is told, the rest stays."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks import Place, a_place, stop
from tests.support.waiting import until
from workers.guard.consumers import Consumers, MemoryConsumer
from workers.host import processes
from workers.rank import lifecycle, shared_memory
from workers.rank.shared_memory import Note, Segment, judge

place = pytest.fixture(name="place")(a_place)

USER, MIB = 1000, 1 << 20
FILE = Segment("psm_0123abcd", 7, MIB, USER)
OURS = Note(frozenset({1}), frozenset({7}))
UNSEEN = Note(frozenset({1}))
NOT_SEEN, NO_NAME = "none of its processes was seen to map it", "its name is not one that an engine's libraries give"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the same tmpfs: what others do in /dev/shm meanwhile is not this test's."""
    folder = Path(tempfile.mkdtemp(prefix="sparkd-test-", dir="/dev/shm"))
    (folder / "psm_before").write_bytes(b"somebody's")
    monkeypatch.setattr(shared_memory, "FOLDER", folder)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("file", "known", "held", "verdict"),
    [
        (FILE, OURS, (), ""),
        (FILE, OURS, (FILE.inode,), None),
        (FILE, Note(frozenset({FILE.inode}), frozenset({FILE.inode})), (), None),
        (Segment("psm_0123abcd", 7, MIB, USER + 1), OURS, (), None),
        (FILE, UNSEEN, (), NOT_SEEN),
        (Segment("weights.bin", 7, MIB, USER), UNSEEN, (), None),
        (Segment("weights.bin", 7, MIB, USER), OURS, (), NO_NAME),
        (Segment("psm_0123abcd", 8, MIB, USER), OURS, (), NOT_SEEN),
    ],
    ids=[
        "its own", "another rank holds it", "older than the rank", "another user's", "never seen with it",
        "never seen, and named by a person", "named by a person", "the name, given again",
    ],
)  # fmt: skip
def test_what_is_surely_a_dead_rank_s(file: Segment, known: Note, held: tuple[int, ...], verdict: str | None) -> None:
    assert judge([file], known, held, user=USER) == ([] if verdict is None else [(file, verdict)])


def test_names_that_an_engine_s_libraries_give() -> None:
    theirs = ("psm_742baa8f", "42011-tp:0-[0-1]-cpushm_0", "vllm_dist_31a31fc7be134aec91366907245db453-tp:0-[0-1]-cpushm_1")
    theirs += ("vllm_offload_9f.mmap", "torch_4711_1804289383_0", "nccl-Xa3Gh1", "sem.loky-1234")
    assert [name for name in theirs if not shared_memory.NAMES.match(name)] == []
    assert [name for name in ("my-vllm_notes", "model.safetensors", "plasma") if shared_memory.NAMES.match(name)] == []


# In the order of their sizes; each is mapped and its descriptor closed, as cpushm's and torch's are.
MAKER = """
import mmap, os, sys, time
folder = {folder!r}
for number, name in enumerate(("psm_large", "notes.txt", "x-cpushm_0")):
    fd = os.open(os.path.join(folder, name), os.O_CREAT | os.O_RDWR, 0o600)
    os.write(fd, bytes(4096 * (300 - 100 * number)))
    globals().setdefault("held", []).append(mmap.mmap(fd, 4096))
    os.close(fd)
os.close(os.open(os.path.join(folder, "psm_closed"), os.O_CREAT | os.O_RDWR, 0o600))
os.open(os.path.join(folder, "psm_before"), os.O_RDWR)
print("up", flush=True)
time.sleep(600)
"""


def noted(place: Place) -> None:
    holders = Consumers(place.run_dir, unified=False)
    holders.refresh(0.0)
    holders.note_shared(0.0)


@pytest.mark.parametrize("end", ["ordered", "killed", "killed with its shim"])
def test_a_rank_s_shared_memory_goes_with_it(place: Place, memory: Path, end: str) -> None:
    handle = place.start(MAKER.format(folder=str(memory)))
    noted(place)
    assert stat.S_IMODE(shared_memory.note_path(place.run_dir, "r1").stat().st_mode) == 0o600
    if end != "ordered":
        os.kill(handle["pid"] if "shim" in end else place.fact()["engine_pid"], signal.SIGKILL)
        until(lambda: not place.fact()["alive"] and not place.fact()["processes"])

    left = {Path(one["path"]).name: one for one in stop(place, handle, 0.0)["left"]}

    assert sorted(os.listdir(memory)) == ["notes.txt", "psm_before", "psm_closed"]
    assert {name: one["bytes"] for name, one in left.items() if one["removed"]} == {"psm_large": 300 * 4096, "x-cpushm_0": 100 * 4096}
    assert {name: one["why"] for name, one in left.items() if not one["removed"]} == {
        "notes.txt": NO_NAME,
        "psm_closed": NOT_SEEN,
    }
    assert list(left) == ["psm_large", "notes.txt", "x-cpushm_0", "psm_closed"], "the largest first"
    lifecycle.forget("r1", place.run_dir)
    assert os.listdir(place.run_dir) == []


def test_what_another_rank_holds_stays_until_that_has_gone(place: Place, memory: Path) -> None:
    handle = place.start(MAKER.format(folder=str(memory)))
    noted(place)
    key = next(segment.inode for segment in shared_memory.segments() if segment.name == "x-cpushm_0")
    other = Path(place.run_dir, "r2.json")
    other.write_text("{}")
    shared_memory.note_path(place.run_dir, "r2").write_text(json.dumps({"boot_id": processes.boot_id(), "before": [], "seen": [key]}))

    first = {Path(one["path"]).name for one in stop(place, handle, 0.0)["left"] if one["removed"]}
    assert (first, (memory / "x-cpushm_0").exists()) == ({"psm_large"}, True)
    other.unlink()
    (second,) = [one for one in stop(place, handle, 0.0)["left"] if one["removed"]]
    assert (Path(second["path"]).name, (memory / "x-cpushm_0").exists()) == ("x-cpushm_0", False)


def test_what_cannot_be_removed_is_told_with_the_reason(place: Place, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = place.start(MAKER.format(folder=str(memory)))
    noted(place)

    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shared_memory.os, "unlink", refuse)
        os.kill(place.fact()["engine_pid"], signal.SIGKILL)
        until(lambda: not place.fact()["processes"])
        why = {Path(one["path"]).name: one["why"] for one in shared_memory.clear(place.run_dir, "r1")}
    assert why["psm_large"] == "Operation not permitted"
    assert stop(place, handle)["gone"]


@pytest.mark.parametrize("of", ["an earlier release", "an earlier boot"])
def test_a_rank_without_notes_of_this_boot_loses_nothing(place: Place, memory: Path, of: str) -> None:
    handle = place.start(MAKER.format(folder=str(memory)))
    notes = shared_memory.note_path(place.run_dir, "r1")
    noted(place)
    if of == "an earlier boot":
        notes.write_text(json.dumps(json.loads(notes.read_text()) | {"boot_id": "00000000-0000-0000-0000-000000000000"}))
    else:
        notes.unlink()
        noted(place)

    assert stop(place, handle, 0.0)["left"] == []
    assert len(os.listdir(memory)) == 5


@pytest.mark.parametrize(("phase", "looks"), [("loading", [0.0, 2.0, 4.0, 10.0]), ("serving", [0.0, 10.0])])
def test_notes_are_taken_often_while_it_starts_and_seldom_later(monkeypatch: pytest.MonkeyPatch, phase: str, looks: list[float]) -> None:
    holders, taken, now_s = Consumers("/nowhere", unified=False), list[float](), 0.0
    held = MemoryConsumer("r1", "m", phase, "", None, None, (4711,), (), 0, 0)

    def note(run_dir: str, rank_id: str, pids: tuple[int, ...]) -> None:
        assert (run_dir, rank_id, pids) == ("/nowhere", "r1", (4711,))
        taken.append(now_s)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory, "note", note)
    holders.ranks = (held,)
    for now_s in (0.0, 2.0, 4.0, 10.0):
        holders.note_shared(now_s)

    assert taken == looks
