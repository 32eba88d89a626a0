"""The release gate: after an engine ended, no load begins until its memory is back, and what stays away or behind is said. Never kills.

On a Spark memory comes back up to a minute after the process is gone, an engine that crashes may leave 33 GB in the driver, and a start
into that is an out-of-memory that one made oneself. A port that is free, or a `systemctl stop` that has returned, says nothing of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkd import metrics
from sparkd.ledger import Ledger
from sparkd.sight import Observation
from sparkd.state import RankFact, RankHandle, Reading

GIB = 1 << 30
# Below this an engine's end cannot be told from what else happens on a machine.
LEAST_BYTES = GIB
SLACK_BYTES = GIB // 2
SHARE = 0.9
LIMIT_S = 90.0
# A Spark restarts within minutes. Of a node that stays away for longer nobody is told any more: it may have been retired.
GONE_S = 600.0
# So much missing, and so large a part of it, that only a restart brings it back.
REBOOT_BYTES, REBOOT_SHARE = 4 * GIB, 0.25
# Memory that goes before the last process does belongs to the same end.
BEFORE_S = 6.0
# Files that one sentence names.
NAMED = 3


@dataclass(slots=True)
class Pending:
    """One rank that ended. held: bytes that it had, of which `device` on the device; available and unaccounted: the least of MemAvailable
    and the most that no line of /proc/meminfo accounts for, just before its end. cure: what was said of it once the limit had passed;
    restart: that it is one. away: its node was out of sight by then, and has been since away_since_s; gone: for so long that it may
    never be back."""

    model: str
    node: str
    held: int
    device: int
    available: int
    unaccounted: int | None
    since_s: float
    cure: str = ""
    restart: bool = False
    away: bool = False
    away_since_s: float | None = None
    gone: bool = False

    @property
    def told(self) -> str:
        """A clause for who would load a model there, and need not know of another one."""
        if self.away:
            return f"{self.node} is out of sight"
        if self.restart:
            return f"{self.node} is to be restarted, because memory of an engine that ended has not come back"
        return f"{self.node} lacks memory of an engine that ended, which something else holds"

    @property
    def holds_up_others(self) -> bool:
        return not (self.cure or self.away)

    def missing(self, available: int) -> int:
        """Bytes that have not come back."""
        return max(0, self.held - (available - self.available))

    def kept(self, reading: Reading) -> int | None:
        """Bytes of it that the driver still has: CUDA's memory is in no line of /proc/meminfo. None where that cannot be told."""
        if self.unaccounted is None or reading.unaccounted_bytes is None or not self.device:
            return None
        return max(0, min(self.device, reading.unaccounted_bytes - (self.unaccounted - self.device)))

    def is_back(self, available: int) -> bool:
        return self.missing(available) <= (1 - SHARE) * self.held + SLACK_BYTES


class Release:
    """Looks at every observation; a stop, a crash and a kill are the same to it. `allows` says whether a load may begin, `shut` on which
    nodes none may until they were seen to."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._clock = clock
        self._living: dict[str, tuple[str, str, int, int]] = {}
        self._lately: dict[str, deque[tuple[float, int, int | None]]] = {}
        self._pending: list[Pending] = []
        # By model and node: what its last rank there left behind and nobody removed.
        self._stays: dict[tuple[str, str], str] = {}

    @property
    def allows(self) -> bool:
        return not any(one.holds_up_others for one in self._pending)

    @property
    def shut(self) -> frozenset[str]:
        return frozenset(self.told)

    @property
    def told(self) -> dict[str, str]:
        """A clause for each node that is shut. One that may have been retired is not: if it comes back, what it lacks counts again."""
        return {one.node: one.told for one in self._stuck}

    @property
    def _stuck(self) -> list[Pending]:
        return [one for one in self._pending if not one.holds_up_others and not one.gone]

    @property
    def condition(self) -> str | None:
        """What an operator reads; None where nothing is waited for."""
        stuck = [
            f"what {one.model} on {one.node} held has not come back; {'that node is out of sight' if one.away else one.cure}"
            for one in self._stuck
        ]
        if stuck:
            return f"MemoryNotReleased: {'; '.join(stuck)}."
        returning = [f"{one.model} on {one.node}" for one in self._pending if one.holds_up_others]
        return f"MemoryReturns: {', '.join(returning)}." if returning else None

    def left(self, handle: RankHandle, found: Sequence[Mapping[str, Any]]) -> None:
        """What a rank that has ended left behind on its node besides memory: see workers.rank.stop. Told at once, and again with what
        does not come back."""
        where, node = (handle.model, handle.node_id), handle.node_id
        self._stays.pop(where, None)
        if removed := [one for one in found if one["removed"]]:
            size = sum(one["bytes"] for one in removed)
            told = f"It left {_named(removed)} on {node}, {_size(size)}: removed, since nothing that lives holds it."
            self._ledger.say("release", handle.model, told, node=node, removed_bytes=size)
        if stays := [one for one in found if not one["removed"]]:
            self._stays[where] = f"{_named(stays)}, {_size(sum(one['bytes'] for one in stays))}"
            for one in stays:
                cure = f"no process holds it; if nobody needs it, `rm {one['path']}` on {node}"
                told = f"It may have left {one['path']} ({_size(one['bytes'])}) on {node}. It stays, because {one['why']}: {cure}."
                self._ledger.say("release", handle.model, told, node=node, left_bytes=one["bytes"])

    def look(self, observation: Observation) -> None:
        """Once in each tick, with what the nodes showed."""
        if observation.ranks is None:
            return
        now_s, readings = self._clock(), _readings(observation)
        for fact in observation.ranks:
            if fact.alive and (held := _held(fact)) is not None:
                _, _, before, device = self._living.get(fact.handle.rank_id, ("", "", 0, 0))
                if held >= before:
                    before, device = held, fact.device_bytes or 0
                self._living[fact.handle.rank_id] = (fact.handle.model, fact.handle.node_id, before, device)
        alive = {fact.handle.rank_id for fact in observation.ranks if fact.alive or fact.processes}
        for rank_id in self._living.keys() - alive:
            model, node, held, device = self._living[rank_id]
            if node in observation.unseen:
                continue
            del self._living[rank_id]
            lately = self._lately.get(node, ())
            least = min((available for _, available, _ in lately), default=None)
            most = max((unaccounted for _, _, unaccounted in lately if unaccounted is not None), default=None)
            if held >= LEAST_BYTES and least is not None:
                self._pending.append(Pending(model, node, held, device, least, most, now_s))
        for node, reading in readings.items():
            lately = self._lately.setdefault(node, deque())
            lately.append((now_s, reading.mem_available_bytes, reading.unaccounted_bytes))
            while lately[0][0] < now_s - BEFORE_S:
                lately.popleft()
        self._pending = [one for one in self._pending if self._waits(one, readings.get(one.node), now_s)]

    def _waits(self, one: Pending, reading: Reading | None, now_s: float) -> bool:
        waited_s = now_s - one.since_s
        one.away = reading is None and waited_s >= LIMIT_S
        one.away_since_s = None if reading is not None else now_s if one.away_since_s is None else one.away_since_s
        one.gone = one.away_since_s is not None and now_s - one.away_since_s >= GONE_S
        if reading is None:
            return True
        missing = one.missing(reading.mem_available_bytes)
        if one.is_back(reading.mem_available_bytes):
            metrics.RELEASE_SECONDS.labels(one.node).observe(waited_s)
            metrics.RELEASE_LEAKED_BYTES.labels(one.node).set(0)
            told = f"{(one.held - missing) / GIB:.1f} of {one.held / GIB:.1f} GiB came back to {one.node} within {waited_s:.1f} s."
            self._ledger.say("release", one.model, told, node=one.node, seconds=round(waited_s, 2))
            return False
        if waited_s < LIMIT_S or one.cure:
            return True
        metrics.RELEASE_LEAKED_BYTES.labels(one.node).set(missing)
        needs_restart = missing >= REBOOT_BYTES and missing >= REBOOT_SHARE * one.held
        kept = one.kept(reading)
        who = "" if kept is None else f", {kept / GIB:.1f} of them in the driver"
        if not needs_restart:
            one.cure = "it is given up"
        elif kept is not None and kept < REBOOT_BYTES:
            one.cure = (
                "other processes or files in /dev/shm hold it (`sparkd doctor` names them), and no load begins there before it is back"
            )
        else:
            one.cure, one.restart = "no load begins there before it was restarted", True
        if stays := self._stays.get((one.model, one.node)):
            one.cure += f", and it may have left {stays}"
        told = f"{missing / GIB:.1f} of {one.held / GIB:.1f} GiB have not come back to {one.node} after {waited_s:.0f} s{who}: {one.cure}."
        self._ledger.say("release", one.model, told, node=one.node, missing_bytes=missing, driver_bytes=kept)
        return needs_restart


def _named(found: Sequence[Mapping[str, Any]]) -> str:
    """The largest come first."""
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f"{', '.join(str(one['path']) for one in found[:NAMED])}{more}"


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / (1 << 20):.1f} MiB"


def _held(fact: RankFact) -> int | None:
    """Bytes on the host and on the device, as far as they are known."""
    return None if fact.host_bytes is None else fact.host_bytes + (fact.device_bytes or 0)


def _readings(observation: Observation) -> Mapping[str, Reading]:
    found = {node.node_id: node.reading for node in observation.nodes if node.reading}
    return found or ({observation.reading.node_id: observation.reading} if observation.reading else {})
