"""Guards a node's memory on its own threads: looks, decides, kills, and writes a bundle. Never waits for the daemon, Ray or a driver.

The thread that looks and kills reads three open files and signals through open descriptors, so that nothing in its way can hang or needs
memory except for numbers. A second thread finds the processes that hold memory. A third writes the bundle after a kill. Others read what
nvidia-smi prints, the disk, and which memory the ranks share: each may hang, and the guard goes on.
"""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from workers.guard import incidents
from workers.guard.consumers import Consumers, MemoryConsumer
from workers.guard.memory_sampler import COLUMNS, MemorySample, MemorySampler, Trend
from workers.guard.policy import PHASES, Decision, GuardedEngine, GuardState, decide, pace_s
from workers.host import meminfo, processes
from workers.host.memory_limits import MemoryLimits
from workers.host.network import shares_memory
from workers.rank import lifecycle
from workers.rank.status import worker_of

HOLDERS_EVERY_S = 2.0
# A daemon's report about requests that is older than this is ignored.
HEARD_S = 10.0
# A guard that has not looked, or not got the lock, for so long does not guard. A daemon that starts meets its agent sooner.
ABSENT_S = 15.0
GONE_TIMEOUT_S = 10.0
ON, WATCH, OFF = "on", "watch", "off"

log = logging.getLogger("sparkd.guard")


class Guard:
    """The guard of one node. The daemon may report in_flight, priority, pinned, state, by and predicted_gib of each model.

    settings: mode (on kills, watch only reports the level, off does neither), soft_gib, hard_gib, floor_gib; None is automatic. An agent's
        guard always acts; its lock keeps the daemon's guard of the same run directory, which acts while no agent answers, from acting
        beside it. An agent that is stuck in the driver holds the lock for ever, so the next agent does without.
    claims: whether this one tries to take it.
    """

    def __init__(
        self, node_id: str, run_dir: str, log_dir: str, proc: Path, sample_s: float, settings: Mapping[str, Any],
        drop: Callable[[], object] | None = None, *, actor: bool = False,
    ) -> None:  # fmt: skip
        self.sample_s = sample_s
        self.claims = True
        self._actor = actor
        # When it last looked, and might have acted.
        self._guarded_at_s = time.monotonic()
        # The fields of a sparkd.state.nouns.Machine; empty before the first look.
        self.machine: dict[str, Any] = {}
        self.folder = Path(log_dir) / "incidents"
        self.consumers = Consumers(run_dir, unified=shares_memory())
        self._last_look: dict[str, Any] = {}
        self._node_id, self._run_dir, self._log_dir, self._proc = node_id, run_dir, Path(log_dir), proc
        self._models: Mapping[str, Mapping[str, Any]] = {}
        self._heard_at_s = float("-inf")
        self.set(settings)
        self._drop = drop
        self._sampler = MemorySampler(proc)
        self._limits: MemoryLimits | None = None
        self._state = GuardState()
        self._decision = Decision("ok")
        self._dying = threading.Event()
        self._ended = threading.Event()
        self._lock_fd = -1
        self._follow_ups: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._killed: dict[str, str] = {}

    @property
    def reading(self) -> dict[str, Any]:
        """The last look at the memory and what the GPU's meter says now, by the names of sparkd.state.nouns.Reading; {} before a look."""
        if not self._last_look:
            return {}
        guarded = time.monotonic() - self._guarded_at_s <= ABSENT_S if self._mode == ON else None
        return self._last_look | {"guarded": guarded, "device_trouble": self.consumers.device_trouble} | self.consumers.meter.values

    def start(self) -> None:
        """Look once and start the threads. Raises OSError if /proc/meminfo cannot be read."""
        if self.look(time.monotonic()) is None:
            self._last_look = dict(meminfo.sample(self._proc)) | {"at_s": time.time()}
        threads = {
            "memory": self._look_forever,
            "memory holders": self._refresh_forever,
            "shared memory": self._note_shared_forever,
            "machine": self._measure_machine_forever,
            "memory bundles": self._follow_up_forever,
            "GPU meter": self._meter_forever,
        }
        for name, work in threads.items():
            threading.Thread(target=work, name=name, daemon=True).start()

    def stop(self) -> None:
        """End the threads after their present look, and nvidia-smi."""
        self._ended.set()
        self.consumers.meter.stop()

    def set(self, settings: Mapping[str, Any]) -> None:
        """Apply other settings from the next look on."""
        self._limits_gib = tuple(settings.get(name) for name in ("soft_gib", "hard_gib", "floor_gib"))
        self._mode = str(settings.get("mode", OFF))

    def hear(self, models: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the daemon's report about its models."""
        self._models, self._heard_at_s = models, time.monotonic()

    def killed(self, rank_id: str) -> str | None:
        """Why the guard killed this rank, even if an earlier process did; None if it did not.

        Another guard of this folder may have killed it a moment ago, before it writes its bundle. So a None is not cached.
        """
        if rank_id not in self._killed and (bundle := incidents.of_rank(self.folder, rank_id)) is not None:
            self._killed[rank_id] = _sentence(str(bundle.get("why")), str(bundle.get("id")))
        return self._killed.get(rank_id)

    def look(self, now_s: float) -> tuple[MemorySample, Trend] | None:
        """Look once and act on it. None if memory cannot be read; the age of the last reading shows that."""
        look = self._sampler.look(now_s)
        if look is None:
            return None
        trend = self._sampler.trend()
        self._limits = MemoryLimits.of(look.total, *self._limits_gib)
        if self._mode != OFF:
            self._guard(look, trend, self._limits)
        else:
            self._decision, self._state = Decision("ok"), GuardState()
        self._last_look = self._memory_reading(look, trend, self._limits)
        return look, trend

    def _guard(self, look: MemorySample, trend: Trend, limits: MemoryLimits) -> None:
        # The list of holders is up to two seconds old, so it may still hold a rank that was killed.
        ranks = [rank for rank in self.consumers.ranks if not self._killed.get(rank.rank_id)]
        fresh = look.at_s - self._heard_at_s <= HEARD_S
        engines = [_engine(rank, self._models.get(rank.model), fresh=fresh) for rank in ranks]
        decision, state = decide(look, trend, engines, limits, self._state, unified=self.consumers.has_device, dying=self._dying.is_set())
        if (decision.kill or decision.drop) and (self._mode != ON or not self._may_act()):
            decision = Decision(decision.level, why=decision.why)
        if decision.kill:
            victim = next(rank for rank in ranks if rank.rank_id == decision.kill)
            for fd in victim.pidfds:
                with suppress(OSError):  # the process is gone, or the other thread closed the descriptor because it is gone
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
            self._dying.set()
            self._remember(victim, decision, look, limits)
        if decision.drop and self._drop:
            self._follow_ups.put(self._drop_page_cache)
        self._decision, self._state = decision, state

    def _remember(self, victim: MemoryConsumer, decision: Decision, look: MemorySample, limits: MemoryLimits) -> None:
        """Collect the bundle's data of this moment. Another thread adds the freed memory and writes the bundle."""
        at_s = time.time()
        incident_id = incidents.new_id(at_s, victim.rank_id)
        self._killed[victim.rank_id] = _sentence(decision.why, incident_id)
        rows = self._sampler.rows()
        self._sampler.forget()
        bundle = {
            "id": incident_id, "at_s": at_s, "node": self._node_id, "model": victim.model, "rank_id": victim.rank_id, "why": decision.why,
            "level": decision.level, "phase": victim.phase, "told": dict(self._models.get(victim.model) or {}), "pids": victim.pids,
            "limits": {"soft_bytes": limits.soft, "hard_bytes": limits.hard, "floor_bytes": limits.floor},
            "engines": [
                {name: getattr(rank, name) for name in ("rank_id", "model", "phase", "host_bytes", "device_bytes")}
                for rank in self.consumers.ranks
            ],
            "available_bytes": look.available, "columns": COLUMNS, "readings": rows,
        }  # fmt: skip
        self._follow_ups.put(lambda: self._finish_kill(victim, bundle))

    def _finish_kill(self, victim: MemoryConsumer, bundle: dict[str, Any]) -> None:
        """Kill what the look left alive, add what came of it to the bundle, and write that."""

        def find() -> Mapping[int, processes.Identity]:
            return processes.members(shim=victim.shim, engine=victim.engine, worker=worker_of(self._run_dir, victim.rank_id))

        survivors = processes.kill_all(find, timeout_s=GONE_TIMEOUT_S)
        self._dying.clear()
        now = self.reading.get("mem_available_bytes", 0)
        tail = lifecycle.read_log(victim.log_path, max_bytes=incidents.TAIL_BYTES, tail_lines=incidents.TAIL_LINES)["text"].splitlines()
        bundle |= {"log": tail, "survivors": survivors, "freed_bytes": int(now - bundle["available_bytes"])}
        log.error("killed %s (%s): %s", victim.model, victim.rank_id, bundle["why"])
        try:
            incidents.write(self.folder, bundle)
        except OSError as error:
            log.error("the bundle %s cannot be written: %s", bundle["id"], error)

    def _drop_page_cache(self) -> None:
        if self._drop:
            log.info("page cache: %s", self._drop())

    def _memory_reading(self, look: MemorySample, trend: Trend, limits: MemoryLimits) -> dict[str, Any]:
        pressure = meminfo.parse_pressure(self._sampler.pressure.text())
        return meminfo.parse_meminfo(self._sampler.meminfo.text()) | pressure | {
            "at_s": time.time(),
            "mem_total_bytes": look.total,
            "mem_available_bytes": look.available,
            "unaccounted_bytes": look.unaccounted,
            "slope_bytes_per_s": trend.short,
            "floor_in_s": trend.seconds_to(look.available, limits.floor),
            "scanned_per_s": trend.scanned_per_s,
            "swapped_per_s": trend.swapped_per_s,
            "level": self._decision.level,
            "level_why": self._decision.why or None,
        }  # fmt: skip

    def _may_act(self) -> bool:
        """Take the lock if it is free; without it only an agent's guard may act. The kernel releases it however the holder ends."""
        if not self.claims:
            self._let_go()
            return False
        if self._lock_fd < 0:
            try:
                fd = os.open(f"{self._run_dir}/guard.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                with suppress(OSError, UnboundLocalError):
                    os.close(fd)
                return self._actor
            self._lock_fd = fd
        return True

    def _let_go(self) -> None:
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def _look_forever(self) -> None:
        wait_s = self.sample_s
        while not self._ended.wait(wait_s):
            try:
                sample = self.look(time.monotonic())
            except Exception:
                # This is the thread's boundary: whatever fails in one look, the next one must come.
                log.exception("a look at the memory failed")
                sample = None
            wait_s = pace_s(*sample, self._limits, self.sample_s) if sample and self._limits and self._mode != OFF else self.sample_s
            if sample and (self._mode != ON or self._may_act() or not self.claims):
                self._guarded_at_s = time.monotonic()
        self._let_go()

    def _refresh_forever(self) -> None:
        # It may fail, for instance where a process ends while it is read, or for a status file of another release.
        self._repeat(self._refresh, "the holders of the memory could not be read")

    def _refresh(self) -> None:
        # One of two guards of this folder asks nvidia-smi: the one that may act, or that the daemon reads.
        self.consumers.refresh(time.monotonic(), ask_device=self.claims and (self._mode != ON or self._actor or self._lock_fd >= 0))

    def _note_shared_forever(self) -> None:
        self._repeat(lambda: self.consumers.note_shared(time.monotonic()), "the memory that the ranks share could not be noted")

    def _meter_forever(self) -> None:
        """On a thread of its own, which nvidia-smi ends with (workers.host.ends_with_parent)."""
        self._repeat(self.consumers.meter.measure, "the GPU could not be measured")

    def _measure_machine_forever(self) -> None:
        """On a thread of its own: a file system that hangs must not hold up the search for engines that the guard may end."""
        self._repeat(self._measure_machine, "the node's disk and uptime could not be read")

    def _measure_machine(self) -> None:
        facts: dict[str, Any] = {"host": socket.gethostname(), "uptime_s": time.clock_gettime(time.CLOCK_BOOTTIME)}
        with suppress(OSError):  # the folder was removed
            disk = shutil.disk_usage(self._log_dir)
            facts |= {"disk_total_bytes": disk.total, "disk_free_bytes": disk.free}
        self.machine = facts

    def _repeat(self, work: Callable[[], None], failure: str) -> None:
        while not self._ended.is_set():
            try:
                work()
            except Exception:
                # As above.
                log.exception("%s", failure)
            self._ended.wait(min(HOLDERS_EVERY_S, self.sample_s * 4))

    def _follow_up_forever(self) -> None:
        while not self._ended.is_set():
            with suppress(queue.Empty):
                work = self._follow_ups.get(timeout=1.0)
                try:
                    work()
                except Exception:
                    # As above.
                    log.exception("what followed an action of the guard failed")


def _engine(rank: MemoryConsumer, report: Mapping[str, Any] | None, *, fresh: bool) -> GuardedEngine:
    report = report or {}
    return GuardedEngine(
        rank.rank_id,
        rank.model,
        PHASES.get(rank.phase, "load"),
        rank.held_bytes,
        rank.growth_bytes,
        report.get("in_flight") if fresh else None,
        int(report.get("priority", 50)),
        bool(report.get("pinned", False)),
    )


def _sentence(why: str, incident_id: str) -> str:
    return f"The memory guard killed it, to keep the machine alive: {why}. `sparkd incidents show {incident_id}` has the last two minutes."
