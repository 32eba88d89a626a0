"""Files in /dev/shm that a rank made: noted while it runs, judged and removed once it is over. Never ends a process.

They are memory, and outlive a process that is killed. vLLM's queues are Python's SharedMemory (psm_, multiprocessing/shared_memory.py),
its CPU ranks' all-reduce is `<group>-cpushm_<rank>` (cpu_communicator.py), its offloaded caches are vllm_offload_ and vllm_ec_; torch names
torch_, NCCL nccl-, CUDA cuda.shm., sem_open(3) sem. Ray's object store, which is no rank's, unlinks its plasma file as soon as it is made.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.host import processes
from workers.rank.status import rank_ids, write_status

FOLDER = Path("/dev/shm")
NAMES = re.compile(r"(psm_|vllm_|torch_|nccl-|cuda\.shm\.|sem\.)|.*-cpushm_\d+$")

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Segment:
    """One file. bytes: what it takes of memory, not its length."""

    name: str
    device: int
    inode: int
    bytes: int
    owner: int
    mode: int

    @property
    def key(self) -> Key:
        """A name is given again, the number of an inode of a tmpfs is not, before the next boot."""
        return self.device, self.inode


@dataclass(frozen=True, slots=True)
class Note:
    """One rank's files: those that were there before it, and later ones that its processes had mapped or open at some moment."""

    before: frozenset[Key]
    seen: frozenset[Key] = frozenset()


def note_path(run_dir: str, rank_id: str) -> Path:
    return Path(run_dir, f"{rank_id}.shm")


def begin(run_dir: str, rank_id: str) -> None:
    """Before the engine starts: what is there now is not its. Raises OSError."""
    _write(note_path(run_dir, rank_id), Note(frozenset(segment.key for segment in segments())))


def note(run_dir: str, rank_id: str, pids: Iterable[int]) -> None:
    """Writes down what these processes of the rank hold now, where it is new. Reads their maps: hangs while a driver holds one's lock."""
    earlier, files = read(run_dir, rank_id), segments()
    if earlier is None or not {segment.key for segment in files} - earlier.before - earlier.seen:
        return
    held = {key for pid in pids for key in _hands(pid, files)}
    if fresh := held - earlier.before - earlier.seen:
        _write(note_path(run_dir, rank_id), Note(earlier.before, earlier.seen | fresh))


def clear(run_dir: str, rank_id: str) -> list[dict[str, Any]]:
    """Once every process of the rank is gone: removes what is surely its. Returns all of it, largest first: path, bytes, removed, why not.

    Nothing without notes: for a rank of an earlier release or an earlier boot.
    """
    noted, files = read(run_dir, rank_id), segments()
    if noted is None or not candidates(files, noted, os.geteuid()):
        return []
    others = (read(run_dir, other) for other in rank_ids(run_dir) if other != rank_id)
    held = {key for other in others if other is not None for key in other.seen}
    sure, unsure = judge(files, noted, held, user=os.geteuid())
    rows = [_row(segment, reason) for segment, reason in unsure] + [_row(segment, _remove(segment)) for segment in sure]
    return sorted(rows, key=lambda row: -row["bytes"])


def read(run_dir: str, rank_id: str) -> Note | None:
    try:
        raw = json.loads(note_path(run_dir, rank_id).read_text(encoding="utf-8"))
        if raw["boot_id"] != processes.boot_id():
            return None
        return Note(*(frozenset((int(device), int(inode)) for device, inode in raw[name]) for name in ("before", "seen")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def segments() -> list[Segment]:
    """Regular files of the folder itself; a file in a folder below was put there on purpose."""
    result = []
    for name in _names():
        try:
            facts = os.lstat(FOLDER / name)
        except OSError:
            continue
        if stat.S_ISREG(facts.st_mode):
            result.append(Segment(name, facts.st_dev, facts.st_ino, facts.st_blocks * 512, facts.st_uid, stat.S_IMODE(facts.st_mode)))
    return result


def candidates(files: Iterable[Segment], noted: Note, user: int) -> list[Segment]:
    """Files that may be the rank's: made after its start by its user, and seen with it or named as an engine's libraries name it."""
    new = [segment for segment in files if segment.owner == user and segment.key not in noted.before]
    return [segment for segment in new if segment.key in noted.seen or NAMES.match(segment.name)]


def judge(files: Iterable[Segment], noted: Note, held: Collection[Key], *, user: int) -> tuple[list[Segment], list[tuple[Segment, str]]]:
    """(files that surely belong to the dead rank, files that may, each with the reason for the doubt). held: seen with other ranks."""
    sure, unsure = [], []
    for segment in candidates(files, noted, user):
        if segment.key in held:
            continue
        if segment.key not in noted.seen:
            unsure.append((segment, "none of its processes was seen to hold it"))
        elif not NAMES.match(segment.name):
            unsure.append((segment, "its name is not one that an engine's libraries give"))
        else:
            sure.append(segment)
    return sure, unsure


def _hands(pid: int, files: Collection[Segment]) -> set[Key]:
    """The files among these that one process holds; of one that is gone, or not for this user to see, what was seen until then."""
    keys_held: set[Key] = set()
    keys, names = {file.key for file in files}, {file.name for file in files}
    devices = {f"{os.major(file.device):02x}:{os.minor(file.device):02x}".encode(): file.device for file in files}
    try:
        for line in _maps(pid):
            # address perms offset device inode path (proc_pid_maps(5))
            fields = line.split(None, 5)
            if len(fields) >= 5 and fields[3] in devices:
                keys_held.add((devices[fields[3]], int(fields[4])))
        for fd in os.listdir(f"/proc/{pid}/fd"):
            link = f"/proc/{pid}/fd/{fd}"
            # The path is as its own mount namespace has it; only what has such a name is looked at, since a stat may hang on a dead server.
            if os.path.basename(os.readlink(link)) in names:
                facts = os.stat(link)
                keys_held.add((facts.st_dev, facts.st_ino))
    except OSError:
        pass
    return keys_held & keys


def _maps(pid: int) -> Iterator[bytes]:
    with open(f"/proc/{pid}/maps", "rb") as file:
        yield from file


def _remove(segment: Segment) -> str:
    """Why it could not be removed; empty where it is gone. Looked at once more: the name may be another's by now."""
    try:
        now = os.lstat(FOLDER / segment.name)
        if (now.st_dev, now.st_ino) == segment.key:
            os.unlink(FOLDER / segment.name)
    except FileNotFoundError:
        pass
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _row(segment: Segment, reason: str) -> dict[str, Any]:
    return {"path": str(FOLDER / segment.name), "bytes": segment.bytes, "removed": not reason, "why": reason}


def _write(path: Path, noted: Note) -> None:
    write_status(path, {"boot_id": processes.boot_id(), "before": sorted(noted.before), "seen": sorted(noted.seen)})


def _names() -> list[str]:
    try:
        return sorted(os.listdir(FOLDER))
    except OSError:
        return []
