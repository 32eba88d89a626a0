"""Owns the holders of a node's memory: the engines' processes, held by descriptors, and what they take on the host and on the device. Never
ends one.

Slow, and on a thread of its own: /proc/PID and nvidia-smi may hang where a driver does. Answers that are wanted in a hurry are made ready
here.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from workers.host import processes
from workers.host.bounded_child import ask, stuck
from workers.host.processes import Identity
from workers.rank import shared_memory
from workers.rank.status import identity_of, rank_ids, read_status, status_path, worker_of

DEVICE_COMMAND = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
GPU_COMMAND = ("nvidia-smi", "--query-gpu=power.draw,utilization.gpu,temperature.gpu", "--format=csv,noheader,nounits")
DEVICE_TIMEOUT_S = 4.0
DEVICE_EVERY_S = 5.0
RETIRED_S = 60.0
# An engine makes the memory that its processes share while it starts; later hardly anything comes.
SHARED_EVERY_S = 10.0
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryConsumer:
    """One rank that lives here. pidfds: of all its processes but Python's resource trackers, which must go last
    (workers.host.processes)."""

    rank_id: str
    model: str
    phase: str
    log_path: str
    shim: Identity | None
    engine: Identity | None
    pids: tuple[int, ...]
    pidfds: tuple[int, ...]
    host_bytes: int
    device_bytes: int | None

    @property
    def held_bytes(self) -> int | None:
        """The memory that its end gives back: without the device's share nobody can tell."""
        return None if self.device_bytes is None else self.host_bytes + self.device_bytes


class Holders:
    """`ranks` is replaced whole by each `refresh`. device_trouble: why nvidia-smi says nothing, None where it does or is not there.

    unified: whether the node's GPU shares the host's memory, or that is not known. On a GPU with memory of its own, what it holds is
    nothing that the host gets back: `has_device` is False there, and the GPU is asked for what it draws alone.
    """

    def __init__(self, run_dir: str, *, unified: bool = True) -> None:
        self.ranks: tuple[MemoryConsumer, ...] = ()
        self.device_trouble: str | None = None
        # The first GPU's gpu_power_w, gpu_busy_percent, gpu_celsius, as far as it says.
        self.gpu: dict[str, float] = {}
        self.has_device = unified
        self._can_ask = True
        self._run_dir = run_dir
        self._fds: dict[Identity, int] = {}
        self._retired: list[tuple[float, int]] = []
        self._device: dict[int, int] = {}
        self._asked_at_s = float("-inf")
        self._noted_at_s: dict[str, float] = {}

    def refresh(self, now_s: float, *, ask_device: bool = True) -> None:
        """Blocks, at worst for two DEVICE_TIMEOUT_S, or for as long as /proc does."""
        ids = rank_ids(self._run_dir)
        stats, boot = (processes.table(), processes.boot_id()) if ids else ({}, "")
        if not ids:
            # Nobody is asked, so nobody answers.
            self.gpu, self.device_trouble = {}, None
        if ids and ask_device and self._can_ask and now_s - self._asked_at_s >= DEVICE_EVERY_S:
            self._asked_at_s = now_s
            self._ask_device()
        found, kept = [], set()
        for rank_id in ids:
            status = read_status(status_path(self._run_dir, rank_id))
            shim, engine = identity_of(status.get("handle"), "pid", "start_ticks"), identity_of(status, "engine_pid", "engine_start_ticks")
            worker = processes.living(worker_of(self._run_dir, rank_id), stats, boot)
            pids = processes.belonging(stats, boot, worker, shim=shim, engine=engine)
            members = [Identity(pid, stats[pid].start_ticks, boot) for pid in sorted(pids)]
            if not members:
                continue
            kept.update(members)
            found.append(self._held(rank_id, status, shim, engine, members))
        self.ranks = tuple(found)
        # A thread that kills may still hold the tuple before this one: a number that is closed now could be another process's a moment
        # later.
        self._retired += [(now_s, self._fds.pop(who)) for who in self._fds.keys() - kept]
        while self._retired and now_s - self._retired[0][0] >= RETIRED_S:
            os.close(self._retired.pop(0)[1])
        self._note_shared(now_s)

    def _note_shared(self, now_s: float) -> None:
        """Last, since maps are read for it: what the ranks share, for whoever clears up after them."""
        before, self._noted_at_s = self._noted_at_s, {}
        for one in self.ranks:
            at_s = before.get(one.rank_id, float("-inf"))
            due = one.phase != "serving" or now_s - at_s >= SHARED_EVERY_S
            if due:
                with suppress(OSError):  # a full disk: what is not written down is told, and not removed
                    shared_memory.note(self._run_dir, one.rank_id, one.pids)
            self._noted_at_s[one.rank_id] = now_s if due else at_s

    def _held(
        self, rank_id: str, status: dict[str, object], shim: Identity | None, engine: Identity | None, members: list[Identity]
    ) -> MemoryConsumer:
        handle, progress = _mapping(status.get("handle")), _mapping(status.get("progress"))
        device = [self._device[who.pid] for who in members if who.pid in self._device]
        return MemoryConsumer(
            rank_id,
            str(handle.get("model", "")),
            str(progress.get("phase", "starting")),
            str(handle.get("log_path", "")),
            shim,
            engine,
            tuple(who.pid for who in members),
            tuple(fd for who in members if not processes.is_resource_tracker(who.pid) and (fd := self._fd(who)) >= 0),
            sum(_anonymous_bytes(who.pid) for who in members),
            sum(device) if device else (None if self.has_device else 0),
        )

    def _fd(self, who: Identity) -> int:
        """Held from now on: it names this process whatever becomes of its number (pidfd_open(2))."""
        if who not in self._fds:
            try:
                fd = os.pidfd_open(who.pid)
            except OSError:
                return -1
            if not processes.is_alive(who):
                os.close(fd)
                return -1
            self._fds[who] = fd
        return self._fds[who]

    def _ask_device(self) -> None:
        # Its draw before it fell silent is no evidence of what it does now.
        self.gpu = {}
        if stuck():
            # One that hangs is enough: the next would hang beside it.
            return
        answer = ask(DEVICE_COMMAND, DEVICE_TIMEOUT_S) if self.has_device else ask(GPU_COMMAND, DEVICE_TIMEOUT_S)
        if answer.missing:
            self.has_device = self._can_ask = False
            return
        if answer.trouble is None and self.has_device:
            self._device = device_bytes(answer.text.splitlines())
            answer = ask(GPU_COMMAND, DEVICE_TIMEOUT_S)
        if answer.trouble is None:
            self.gpu = gpu_of(answer.text)
        self.device_trouble = answer.trouble


def device_bytes(lines: Iterable[str]) -> dict[int, int]:
    """pid -> bytes, of rows `pid, [name,] used_memory`; a row whose memory is [N/A] is left out."""
    found = {}
    for row in csv.reader(line.replace("|", ",") for line in lines):
        words = [word.strip() for word in row]
        if len(words) >= 2 and words[0].isdigit() and (number := words[-1].removesuffix(" MiB")).isdigit():
            found[int(words[0])] = int(number) * MIB
    return found


def gpu_of(text: str) -> dict[str, float]:
    """Watts, percent of time in which a kernel was resident, degrees Celsius; what is [N/A] is left out."""
    found = {}
    for name, word in zip(("gpu_power_w", "gpu_busy_percent", "gpu_celsius"), text.partition("\n")[0].split(","), strict=False):
        try:
            found[name] = float(word)
        except ValueError:
            continue
    return found


def _anonymous_bytes(pid: int) -> int:
    """Mapped files are page cache, which nobody's end gives back."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon:")), 0)
    except OSError:
        return 0


def _mapping(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}
