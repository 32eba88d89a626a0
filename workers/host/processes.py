"""Finds the processes of a rank on this machine, and ends exactly those. Never starts one, never guesses by name.

A process is identified by (pid, start time, boot id), because the kernel reuses pids. A rank's processes are its engine, the members of its
shim's session, and the descendants of either: an orphan becomes the shim's child, which is a subreaper. All of that stands in
/proc/PID/stat. Files that the kernel reads from a process's own memory (cmdline, environ, maps) block while a driver holds that memory's
lock, so they are never read here. psutil would: its name() reads cmdline for a name of 15 characters, such as an engine core's. Nor does it
tell a process's session, and its create_time() moves with the clock, so that no file can hold it.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANK_ID_VARIABLE = "SPARKD_RANK_ID"
# The name that a shim gives itself.
SHIM_NAME = "sparkd-rank"
# Beginnings of the names, of 15 characters at most, that vLLM's front end, engine cores and workers give themselves, and Ray its workers.
VLLM_NAMES = ("VLLM::", "vllm", "ray::RayWorker")
RUN_DIR_VARIABLE = "SPARKD_RUN_DIR"
STOP = signal.SIGTERM
STOP_NOW = signal.SIGUSR1
KILL = signal.SIGKILL
POLL_S = 0.02
READ_BYTES = 1 << 15
PROC = "/proc"
# Errors that mean that this process lacks a resource. They prove nothing about the process that was read, which may well live.
LACKS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 4, 15, 36  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class Identity:
    """One process. start_ticks: clock ticks between boot and its start, field 22 of /proc/PID/stat (proc_pid_stat(5))."""

    pid: int
    start_ticks: int
    boot_id: str


@dataclass(frozen=True, slots=True)
class Stat:
    """A line of /proc/PID/stat.

    state: the kernel's letter.
    session: the pid of the session's first process.
    cpu_ticks: clock ticks used by the process and its ended children (compilers, each of which lives for seconds).
    name: of its program, or what it calls itself.
    """

    pid: int
    state: str
    parent: int
    session: int
    start_ticks: int
    cpu_ticks: int = 0
    name: str = ""


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def identity(pid: int) -> Identity | None:
    """The identity of a living process; None where no such process lives."""
    stat = read_stat(pid)
    return Identity(pid, stat.start_ticks, boot_id()) if stat and not _is_over(stat) else None


def is_alive(who: Identity) -> bool:
    """Whether the process lives. A zombie counts as dead, unless threads of it still run: then its memory has not come back."""
    stat = read_stat(who.pid)
    return stat is not None and stat.start_ticks == who.start_ticks and not _is_over(stat) and who.boot_id == boot_id()


def read_stat(pid: int, proc: str = PROC) -> Stat | None:
    text = _read(pid, "stat", proc)
    if not text:
        return None
    # The command name stands in parentheses and may hold anything, parentheses and spaces included.
    end = text.rfind(b")")
    fields, name = text[end + 2 :].split(), os.fsdecode(text[text.find(b"(") + 1 : end])
    return Stat(pid, fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]), sum(map(int, fields[11:15])), name)


def anonymous_bytes(pid: int, proc: str = PROC) -> int:
    """The memory that the end of a process frees; 0 of one that has ended, or is another user's. Mapped files are page cache."""
    lines = _read(pid, "status", proc).splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(b"RssAnon:")), 0)


def table(proc: str = PROC) -> dict[int, Stat]:
    """Every process that is not over, by pid."""
    stats = (read_stat(int(name), proc) for name in os.listdir(proc) if name.isdigit())
    return {stat.pid: stat for stat in stats if stat and not _is_over(stat)}


def of_ranks(stats: Mapping[int, Stat], workers: Collection[int] = ()) -> set[int]:
    """Pids of the ranks of every sparkd: their shims, by the name that these give themselves, what is in a shim's session, and what
    descends from either. workers: pids of Ray workers of ranks, which Ray starts."""
    shims = {pid for pid, stat in stats.items() if stat.name == SHIM_NAME}
    ours = {pid for pid, stat in stats.items() if pid in workers or pid in shims or stat.session in shims}
    return ours | descendants(ours, stats)


def members(*, shim: Identity | None, engine: Identity | None, worker: Identity | None = None) -> dict[int, Identity]:
    """The living processes of a rank by pid, its shim not among them. shim and engine are as its status file names them, worker as its file
    of a Ray worker does."""
    stats, boot = table(), boot_id()
    pids = belonging(stats, boot, worker, shim=shim, engine=engine)
    # A rank started from within a rank must not end its starter.
    return {pid: Identity(pid, stats[pid].start_ticks, boot) for pid in pids - {os.getpid()}}


def belonging(stats: Mapping[int, Stat], boot: str, worker: Identity | None, *, shim: Identity | None, engine: Identity | None) -> set[int]:
    """Pids of a rank, its shim not among them. stats: of this moment and this boot.

    A session's number is the pid of its first process, and the kernel gives it to no other process before its last member has ended: it is
    the shim's unless another process has that pid now.
    """
    pids = {pid for process in (shim, engine, worker) for pid in living(process, stats, boot)}
    if shim and shim.boot_id == boot and (shim.pid in pids or shim.pid not in stats):
        pids |= {pid for pid, stat in stats.items() if stat.session == shim.pid}
    return (pids | descendants(pids, stats)) - (living(shim, stats, boot) if shim else set())


def living(who: Identity | None, stats: Mapping[int, Stat], boot: str) -> set[int]:
    """The pid of the process, where it is in `stats` and was not reused; else an empty set."""
    here = who is not None and who.boot_id == boot and who.pid in stats and stats[who.pid].start_ticks == who.start_ticks
    return {who.pid} if who and here else set()


def descendants(roots: Collection[int], stats: Mapping[int, Stat]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    below: set[int] = set()
    waiting = list(roots)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in below:
                below.add(child)
                waiting.append(child)
    return below


def prctl(option: int, value: Any) -> bool:
    """Call prctl(2). False where the kernel refuses."""
    import ctypes

    return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)


def hide() -> bool:
    """Close this process's environment, memory, open files and root folder to other processes of its user, which may be engines that run a
    model's own code. False where the kernel refuses. From now on root owns the process's files in /proc: it cannot read its own environ
    and oom_score_adj either, while fd, maps and status stay readable (ptrace(2), PR_SET_DUMPABLE(2const)). Its children are not hidden.
    """
    import ctypes

    return prctl(PR_SET_DUMPABLE, ctypes.c_ulong(0))


def send(who: Identity, number: signal.Signals) -> bool:
    """Signal exactly this process. False where it is gone or belongs to another user.

    A pidfd stays bound to its process (pidfd_open(2)), so a check after opening leaves no gap in which the pid could be reused.
    """
    try:
        handle = os.pidfd_open(who.pid)
    except ProcessLookupError:
        return False
    try:
        if not is_alive(who):
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(handle)


def kill_all(find: Callable[[], Mapping[int, Identity]], *, timeout_s: float, between: Callable[[float], object] = time.sleep) -> list[int]:
    """SIGKILL the processes of `find` until it returns none. Returns the pids that live after timeout_s seconds (uninterruptible waits).
    `between` is called with the seconds to wait between two looks."""
    started_s = time.monotonic()
    while left := find():
        if time.monotonic() - started_s > timeout_s:
            return sorted(left)
        for who in left.values():
            send(who, signal.SIGKILL)
        between(POLL_S)
    return []


def wait_gone(who: Iterable[Identity], *, timeout_s: float) -> bool:
    """True once all have ended; False after timeout_s seconds."""
    deadline_s = time.monotonic() + timeout_s
    waiting = list(who)
    while waiting := [process for process in waiting if is_alive(process)]:
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def _is_over(stat: Stat) -> bool:
    if stat.state not in "ZXx":
        return False
    try:
        return len(os.listdir(f"/proc/{stat.pid}/task")) <= 1
    except OSError as error:
        if error.errno in LACKS:
            raise
        return True


def _read(pid: int, name: str, proc: str = PROC) -> bytes:
    """A file of /proc/PID; empty where the process is gone or another user's. Without pathlib, which is slow for all processes of a
    machine.

    Raises OSError where this process may open no more files.
    """
    try:
        fd = os.open(f"{proc}/{pid}/{name}", os.O_RDONLY)
        try:
            return os.read(fd, READ_BYTES)  # the kernel gives the whole of `stat` and `status` at once
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in LACKS:
            raise
        return b""
