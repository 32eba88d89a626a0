"""The release gate: after an engine ended, no load begins until its memory is back, and what does not come back is said. Never kills.

On a Spark memory comes back up to a minute after the process is gone, an engine that crashes may leave 33 GB in the driver, and a start
into that is an out-of-memory that one made oneself. A port that is free, or a `systemctl stop` that has returned, says nothing of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sparkd import metrics
from sparkd.ledger import Ledger
from sparkd.sight import Observation
from sparkd.state import RankFact, Reading

GIB = 1 << 30
# Below this an engine's end cannot be told from what else happens on a machine.
LEAST_BYTES = GIB
SLACK_BYTES = GIB // 2
SHARE = 0.9
LIMIT_S = 90.0
# So much missing, and so large a part of it, that only a restart brings it back.
REBOOT_BYTES, REBOOT_SHARE = 4 * GIB, 0.25
# Memory that goes before the last process does belongs to the same end.
BEFORE_S = 6.0


@dataclass(slots=True)
class Pending:
    """One rank that ended. held: bytes that it had; available: the least of MemAvailable just before its end."""

    model: str
    node: str
    held: int
    available: int
    since_s: float
    told: bool = False

    def missing(self, available: int) -> int:
        """Bytes that have not come back."""
        return max(0, self.held - (available - self.available))

    def is_back(self, available: int) -> bool:
        return self.missing(available) <= (1 - SHARE) * self.held + SLACK_BYTES


class Release:
    """Looks at every observation; a stop, a crash and a kill are the same to it. `allows` says whether a load may begin."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._clock = clock
        self._living: dict[str, tuple[str, str, int]] = {}
        self._lately: dict[str, deque[tuple[float, int]]] = {}
        self._pending: list[Pending] = []

    @property
    def allows(self) -> bool:
        return not self._pending

    @property
    def condition(self) -> str | None:
        """What an operator reads; None where nothing is waited for."""
        if not self._pending:
            return None
        stuck = [one for one in self._pending if one.told]
        if stuck:
            names = ", ".join(f"{one.model} on {one.node}" for one in stuck)
            return f"MemoryNotReleased: what {names} held has not come back; no load begins before that node was restarted."
        return f"MemoryReturns: {', '.join(f'{one.model} on {one.node}' for one in self._pending)}."

    def look(self, observation: Observation) -> None:
        """Once in each tick, with what the nodes showed."""
        if observation.ranks is None:
            return
        now_s, readings = self._clock(), _readings(observation)
        for fact in observation.ranks:
            if fact.alive and (held := _held(fact)) is not None:
                before = self._living.get(fact.handle.rank_id, ("", "", 0))[2]
                self._living[fact.handle.rank_id] = (fact.handle.model, fact.handle.node_id, max(held, before))
        alive = {fact.handle.rank_id for fact in observation.ranks if fact.alive or fact.processes}
        for rank_id in self._living.keys() - alive:
            model, node, held = self._living[rank_id]
            if node in observation.unseen:
                continue
            del self._living[rank_id]
            least = min((available for _, available in self._lately.get(node, ())), default=None)
            if held >= LEAST_BYTES and least is not None:
                self._pending.append(Pending(model, node, held, least, now_s))
        for node, reading in readings.items():
            lately = self._lately.setdefault(node, deque())
            lately.append((now_s, reading.mem_available_bytes))
            while lately[0][0] < now_s - BEFORE_S:
                lately.popleft()
        self._pending = [one for one in self._pending if self._waits(one, readings.get(one.node), now_s)]

    def _waits(self, one: Pending, reading: Reading | None, now_s: float) -> bool:
        if reading is None:
            return True
        waited_s, missing = now_s - one.since_s, one.missing(reading.mem_available_bytes)
        if one.is_back(reading.mem_available_bytes):
            metrics.RELEASE_SECONDS.labels(one.node).observe(waited_s)
            metrics.RELEASE_LEAKED_BYTES.labels(one.node).set(0)
            told = f"{one.held / GIB:.1f} GiB of it came back to {one.node} within {waited_s:.1f} s."
            self._ledger.say("release", one.model, told, node=one.node, seconds=round(waited_s, 2))
            return False
        if waited_s < LIMIT_S or one.told:
            return True
        metrics.RELEASE_LEAKED_BYTES.labels(one.node).set(missing)
        needs_restart = missing >= REBOOT_BYTES and missing >= REBOOT_SHARE * one.held
        cure = "no load begins before that node was restarted" if needs_restart else "it is given up"
        told = f"{missing / GIB:.1f} of {one.held / GIB:.1f} GiB have not come back to {one.node} after {waited_s:.0f} s: {cure}."
        self._ledger.say("release", one.model, told, node=one.node, missing_bytes=missing)
        one.told = True
        return needs_restart


def _held(fact: RankFact) -> int | None:
    """Bytes on the host and on the device, as far as they are known."""
    return None if fact.host_bytes is None else fact.host_bytes + (fact.device_bytes or 0)


def _readings(observation: Observation) -> Mapping[str, Reading]:
    found = {node.node_id: node.reading for node in observation.nodes if node.reading}
    return found or ({observation.reading.node_id: observation.reading} if observation.reading else {})
