"""Finds the engines that hold a node's memory: their processes, held by descriptors, and their bytes on host and device.

This is slow and runs on its own thread, because nvidia-smi hangs when a driver hangs. The guard reads the last result.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from workers.guard.gpu_meter import GpuMeter
from workers.host import processes
from workers.host.bounded_child import ask, stuck
from workers.host.processes import Identity
from workers.rank import shared_memory
from workers.rank.report import growth_of, report_path
from workers.rank.status import engine_of, rank_ids, read_status, shim_of, status_path, worker_of

DEVICE_COMMAND = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
DEVICE_TIMEOUT_S = 4.0
DEVICE_EVERY_S = 5.0
RETIRED_S = 60.0
# An engine creates the memory that its processes share while it starts; later it creates hardly any.
SHARED_EVERY_S = 10.0
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryConsumer:
    """One rank that lives on this node.

    growth_bytes: what it may still take within what its KV cache was sized for.
    pidfds: of all its processes.
    """

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
    growth_bytes: int = 0

    @property
    def held_bytes(self) -> int | None:
        """The memory in bytes that its end frees; None if the device's share is unknown."""
        return None if self.device_bytes is None else self.host_bytes + self.device_bytes


class Consumers:
    """The engines on this node. Each `refresh` replaces `ranks` whole.

    unified: whether the GPU shares the host's memory, or may do so. On a GPU with its own memory `has_device` is False: ending an engine
        frees none of it for the host, and nvidia-smi is not asked for the memory of processes.
    meter: runs while an engine is here.
    """

    def __init__(self, run_dir: str, *, unified: bool = True) -> None:
        self.ranks: tuple[MemoryConsumer, ...] = ()
        self.meter = GpuMeter()
        self.has_device = unified
        self._trouble: str | None = None
        self._run_dir = run_dir
        self._fds: dict[Identity, int] = {}
        self._retired: list[tuple[float, int]] = []
        self._device: dict[int, int] = {}
        self._asked_at_s = float("-inf")
        self._noted_at_s: dict[str, float] = {}

    @property
    def device_trouble(self) -> str | None:
        """Why nvidia-smi gives no answer; None if it does, is not asked, or is not installed."""
        return self._trouble or self.meter.trouble

    def refresh(self, now_s: float, *, ask_device: bool = True) -> None:
        """Find the engines and their memory. Blocks, at most for DEVICE_TIMEOUT_S unless /proc hangs."""
        ids = rank_ids(self._run_dir)
        stats, boot = (processes.table(), processes.boot_id()) if ids else ({}, "")
        asks = bool(ids) and ask_device
        self.meter.want(asks)
        if not asks:
            self._trouble = None
        if asks and self.has_device and now_s - self._asked_at_s >= DEVICE_EVERY_S:
            self._asked_at_s = now_s
            self._ask_device()
        ranks, kept = [], set()
        for rank_id in ids:
            status = read_status(status_path(self._run_dir, rank_id))
            shim, engine = shim_of(status.get("handle") or {}), engine_of(status)
            pids = processes.belonging(stats, boot, worker_of(self._run_dir, rank_id), shim=shim, engine=engine)
            members = [Identity(pid, stats[pid].start_ticks, boot) for pid in sorted(pids)]
            if not members:
                continue
            kept.update(members)
            ranks.append(self._held(rank_id, status, shim, engine, members))
        self.ranks = tuple(ranks)
        # The guard's thread may still use the earlier tuple. If a descriptor were closed now, its number could soon be another process's.
        self._retired += [(now_s, self._fds.pop(process)) for process in self._fds.keys() - kept]
        while self._retired and now_s - self._retired[0][0] >= RETIRED_S:
            os.close(self._retired.pop(0)[1])

    def note_shared(self, now_s: float) -> None:
        """Write down the memory that the ranks share, for the clean-up after their end. It reads their maps, which hangs with their driver:
        on a thread of its own."""
        before, self._noted_at_s = self._noted_at_s, {}
        for rank in self.ranks:
            at_s = before.get(rank.rank_id, float("-inf"))
            due = rank.phase != "serving" or now_s - at_s >= SHARED_EVERY_S
            if due:
                with suppress(OSError):  # a full disk: memory that is not noted is reported and not removed
                    shared_memory.note(self._run_dir, rank.rank_id, rank.pids)
            self._noted_at_s[rank.rank_id] = now_s if due else at_s

    def _held(
        self, rank_id: str, status: Mapping[str, Any], shim: Identity | None, engine: Identity | None, members: list[Identity]
    ) -> MemoryConsumer:
        handle, progress = status.get("handle") or {}, status.get("progress") or {}
        device = [self._device[process.pid] for process in members if process.pid in self._device]
        return MemoryConsumer(
            rank_id,
            str(handle.get("model", "")),
            str(progress.get("phase", "starting")),
            str(handle.get("log_path", "")),
            shim,
            engine,
            tuple(process.pid for process in members),
            tuple(fd for process in members if (fd := self._fd(process)) >= 0),
            sum(processes.anonymous_bytes(process.pid) for process in members),
            sum(device) if device else (None if self.has_device else 0),
            growth_of(report_path(self._run_dir, rank_id)),
        )

    def _fd(self, process: Identity) -> int:
        """A descriptor, kept from now on, that refers to this process even if its pid is used again (pidfd_open(2)); -1 if it is gone."""
        if process not in self._fds:
            try:
                fd = os.pidfd_open(process.pid)
            except OSError:
                return -1
            if not processes.is_alive(process):
                os.close(fd)
                return -1
            self._fds[process] = fd
        return self._fds[process]

    def _ask_device(self) -> None:
        if stuck():
            # An nvidia-smi hangs already; another would hang too.
            return
        answer = ask(DEVICE_COMMAND, DEVICE_TIMEOUT_S)
        if answer.missing:
            self.has_device = False
            return
        if answer.trouble is None:
            self._device = device_bytes(answer.text.splitlines())
        self._trouble = answer.trouble


def device_bytes(lines: Iterable[str]) -> dict[int, int]:
    """pid -> bytes, from rows `pid, [name,] used_memory`. A row whose memory is [N/A] is left out."""
    by_pid = {}
    for row in csv.reader(line.replace("|", ",") for line in lines):
        words = [word.strip() for word in row]
        if len(words) >= 2 and words[0].isdigit() and (number := words[-1].removesuffix(" MiB")).isdigit():
            by_pid[int(words[0])] = int(number) * MIB
    return by_pid
