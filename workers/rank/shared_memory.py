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
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.host import processes
from workers.rank.status import rank_ids, write_status

FOLDER = Path("/dev/shm")
NAMES = re.compile(r"(psm_|vllm_|torch_|nccl-|cuda\.shm\.|sem\.)|.*-cpushm_\d+$")


@dataclass(frozen=True, slots=True)
class Segment:
    """One file.

    inode: unlike a name, a tmpfs does not give its number again before the next boot.
    bytes: the memory that it takes.
    """

    name: str
    inode: int
    bytes: int
    owner: int


@dataclass(frozen=True, slots=True)
class Note:
    """One rank's files by inode: those that were there before it, and later ones that its processes had mapped at some moment."""

    before: frozenset[int]
    seen: frozenset[int] = frozenset()


def note_path(run_dir: str, rank_id: str) -> Path:
    return Path(run_dir, f"{rank_id}.shm")


def begin(run_dir: str, rank_id: str) -> None:
    """Before the engine starts: what is there now is not its. Raises OSError."""
    _write(note_path(run_dir, rank_id), Note(frozenset(segment.inode for segment in segments())))


def note(run_dir: str, rank_id: str, pids: Iterable[int]) -> None:
    """Write down the files that these processes of the rank have mapped, where they are new. Hangs while a driver holds the lock of one's
    maps."""
    earlier = read(run_dir, rank_id)
    if earlier is None:
        return
    new = {segment.inode for segment in segments()} - earlier.before - earlier.seen
    if new and (mapped := new & {inode for pid in pids for inode in _mapped(pid)}):
        _write(note_path(run_dir, rank_id), Note(earlier.before, earlier.seen | mapped))


def clear(run_dir: str, rank_id: str) -> list[dict[str, Any]]:
    """Once every process of the rank is gone: removes the files that are surely its. Returns all that may be its, largest first: path,
    bytes, removed, why not.

    Nothing without notes: for a rank of an earlier release or an earlier boot.
    """
    noted = read(run_dir, rank_id)
    if noted is None:
        return []
    others = (read(run_dir, other) for other in rank_ids(run_dir) if other != rank_id)
    held = {inode for other in others if other is not None for inode in other.seen}
    rows = []
    for segment, doubt in judge(segments(), noted, held, user=os.geteuid()):
        why = doubt or _remove(segment)
        rows.append({"path": str(FOLDER / segment.name), "bytes": segment.bytes, "removed": not why, "why": why})
    return sorted(rows, key=lambda row: -row["bytes"])


def read(run_dir: str, rank_id: str) -> Note | None:
    try:
        raw = json.loads(note_path(run_dir, rank_id).read_text(encoding="utf-8"))
        return Note(frozenset(raw["before"]), frozenset(raw["seen"])) if raw["boot_id"] == processes.boot_id() else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def segments() -> list[Segment]:
    """Regular files of the folder itself; a file in a folder below was put there on purpose."""
    result = []
    for name in sorted(os.listdir(FOLDER)):
        with suppress(OSError):  # it has gone meanwhile
            facts = os.lstat(FOLDER / name)
            if stat.S_ISREG(facts.st_mode):
                result.append(Segment(name, facts.st_ino, facts.st_blocks * 512, facts.st_uid))
    return result


def judge(files: Iterable[Segment], noted: Note, held: Collection[int], *, user: int) -> list[tuple[Segment, str]]:
    """The files that may belong to the dead rank, each with the reason for a doubt; without one it is surely the rank's.

    They were made after its start by its user, and are known to it or named as an engine's libraries name them. held: of other ranks.
    """
    verdicts = []
    for segment in files:
        is_seen, is_named = segment.inode in noted.seen, bool(NAMES.match(segment.name))
        if segment.owner != user or segment.inode in noted.before or segment.inode in held or not (is_seen or is_named):
            continue
        doubt = "" if is_named else "its name is not one that an engine's libraries give"
        verdicts.append((segment, doubt if is_seen else "none of its processes was seen to map it"))
    return verdicts


def _mapped(pid: int) -> set[int]:
    """Inodes of the folder's files that a process has mapped; of one that is gone, or not for this user to see, those read until then."""
    device = os.stat(FOLDER).st_dev
    name, inodes = f"{os.major(device):02x}:{os.minor(device):02x}".encode(), set[int]()
    with suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
        for line in maps:
            # address perms offset device inode path (proc_pid_maps(5))
            fields = line.split(None, 5)
            if fields[3] == name:
                inodes.add(int(fields[4]))
    return inodes


def _remove(segment: Segment) -> str:
    """Why it could not be removed; empty where it is gone. Looked at once more: the name may be another's by now."""
    path = FOLDER / segment.name
    try:
        if path.lstat().st_ino == segment.inode:
            os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _write(path: Path, noted: Note) -> None:
    write_status(path, {"boot_id": processes.boot_id(), "before": sorted(noted.before), "seen": sorted(noted.seen)})
