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
from workers.rank.status import write_status

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
    _write(note_path(run_dir, rank_id), Note(frozenset(one.key for one in segments())))


def note(run_dir: str, rank_id: str, pids: Iterable[int]) -> None:
    """Writes down what these processes of the rank hold now, where it is new. Reads their maps: may hang where a driver does."""
    known, files = read(run_dir, rank_id), segments()
    if known is None or not {one.key for one in files} - known.before - known.seen:
        return
    held, _ = holders(files, pids)
    if fresh := held - known.before - known.seen:
        _write(note_path(run_dir, rank_id), Note(known.before, known.seen | fresh))


def clear(run_dir: str, rank_id: str) -> list[dict[str, Any]]:
    """Once every process of the rank is gone: removes what is surely its. Returns all of it, largest first: path, bytes, removed, why not.

    Nothing where nobody took notes, of an earlier release's rank or an earlier boot's.
    """
    known, files = read(run_dir, rank_id), segments()
    if known is None or not candidates(files, known, os.geteuid()):
        return []
    held, blind = holders(files, processes.table())
    sure, unsure = judge(files, known, held, user=os.geteuid(), blind=blind)
    told = [_told(one, why) for one, why in unsure] + [_told(one, _remove(one)) for one in sure]
    return sorted(told, key=lambda one: -one["bytes"])


def read(run_dir: str, rank_id: str) -> Note | None:
    try:
        raw = json.loads(note_path(run_dir, rank_id).read_text(encoding="utf-8"))
        if raw["boot_id"] != processes.boot_id():
            return None
        return Note(*(frozenset((int(device), int(inode)) for device, inode in raw[name]) for name in ("before", "seen")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def segments() -> list[Segment]:
    """Regular files of the folder itself; what lies deeper somebody keeps there on purpose."""
    found = []
    for name in _names():
        try:
            one = os.lstat(FOLDER / name)
        except OSError:
            continue
        if stat.S_ISREG(one.st_mode):
            found.append(Segment(name, one.st_dev, one.st_ino, one.st_blocks * 512, one.st_uid, stat.S_IMODE(one.st_mode)))
    return found


def holders(files: Collection[Segment], pids: Iterable[int]) -> tuple[set[Key], bool]:
    """Which of the files these processes have mapped or open, and whether any could not be looked into."""
    held: set[Key] = set()
    blind = False
    for pid in pids:
        hands = _hands(pid, files)
        held |= hands or set()
        blind |= hands is None
    return held, blind


def candidates(files: Iterable[Segment], known: Note, user: int) -> list[Segment]:
    """Files that may be the rank's: made after its start by its user, and seen with it or named as an engine's libraries name it."""
    return [one for one in files if one.owner == user and one.key not in known.before and (one.key in known.seen or NAMES.match(one.name))]


def judge(
    files: Iterable[Segment], known: Note, held: Collection[Key], *, user: int, blind: bool
) -> tuple[list[Segment], list[tuple[Segment, str]]]:
    """Files that are surely the dead rank's and nobody's, and those that may be, with the reason against it. held: by any living process.

    blind: some processes could not be looked into. They do not hold a file that only its user may open, unless they are root's.
    """
    sure, unsure = [], []
    for one in candidates(files, known, user):
        if one.key in held:
            continue
        if one.key not in known.seen:
            unsure.append((one, "nobody saw it in its processes' hands"))
        elif not NAMES.match(one.name):
            unsure.append((one, "its name is none that an engine's libraries give"))
        elif blind and one.mode & 0o077:
            unsure.append((one, "other users may open it, and not every process can be looked into"))
        else:
            sure.append(one)
    return sure, unsure


def _hands(pid: int, files: Collection[Segment]) -> set[Key] | None:
    """The files among these that one process holds; None where that is not for this user to see, nothing of one that is gone."""
    found: set[Key] = set()
    keys, names = {one.key for one in files}, {one.name for one in files}
    devices = {f"{os.major(one.device):02x}:{os.minor(one.device):02x}".encode(): one.device for one in files}
    try:
        for line in _maps(pid):
            # address perms offset device inode path (proc_pid_maps(5))
            fields = line.split(None, 5)
            if len(fields) >= 5 and fields[3] in devices:
                found.add((devices[fields[3]], int(fields[4])))
        for fd in os.listdir(f"/proc/{pid}/fd"):
            link = f"/proc/{pid}/fd/{fd}"
            # The path is as its own mount namespace has it; only what has such a name is looked at, since a stat may hang on a dead server.
            if os.path.basename(os.readlink(link)) in names:
                one = os.stat(link)
                found.add((one.st_dev, one.st_ino))
    except (FileNotFoundError, ProcessLookupError):
        return found & keys
    except OSError:
        return None
    return found & keys


def _maps(pid: int) -> Iterator[bytes]:
    with open(f"/proc/{pid}/maps", "rb") as file:
        yield from file


def _remove(one: Segment) -> str:
    """Why it could not be removed; empty where it is gone. Looked at once more: the name may be another's by now."""
    try:
        now = os.lstat(FOLDER / one.name)
        if (now.st_dev, now.st_ino) == one.key:
            os.unlink(FOLDER / one.name)
    except FileNotFoundError:
        pass
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _told(one: Segment, why: str) -> dict[str, Any]:
    return {"path": str(FOLDER / one.name), "bytes": one.bytes, "removed": not why, "why": why}


def _write(path: Path, known: Note) -> None:
    write_status(path, {"boot_id": processes.boot_id(), "before": sorted(known.before), "seen": sorted(known.seen)})


def _names() -> list[str]:
    try:
        return sorted(os.listdir(FOLDER))
    except OSError:
        return []
