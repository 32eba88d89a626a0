"""The release gate: until an ended engine's memory is back, a load begins on its node only if MemAvailable covers it and the soft limit.

After LIMIT_S what is still missing counts as held, in the book of memory, until it is back.

On a Spark memory returns up to a minute after the process has ended, and an engine that crashes may leave 33 GB in the driver. A start in
that time runs out of memory. A free port, or a `systemctl stop` that has returned, does not show that the memory is free.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sparkd import metrics
from sparkd.cluster.node_tracker import Observation
from sparkd.condition import Condition
from sparkd.control.journal import Journal
from sparkd.state.nouns import RankFact, RankHandle, Reading
from sparkd.units import GIB
from workers.host.memory_limits import MemoryLimits

# The memory counts as back when at most this is missing, or this share of what the engine held: other programs take some meanwhile.
LOSS_BYTES, LOSS_SHARE = GIB, 0.1
# Memory that has not come back after that long may stay away. By then any other program may have taken this.
LIMIT_S = 90.0
LATE_LOSS_BYTES, LATE_LOSS_SHARE = 4 * GIB, 0.25
# Memory that goes before the last process does belongs to the same end.
BEFORE_S = 6.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A living rank at one moment, bytes.

    held: by the rank.
    whole: available on its node or held by living ranks.
    """

    handle: RankHandle
    at_s: float
    held: int
    whole: int


@dataclass(slots=True)
class Ended:
    """The memory of a rank that ended, bytes.

    whole: what was available on the node or held by living ranks just before, less what earlier ends lacked then.
    missing: what has not come back. It shrinks only: memory that was back counts as back, whatever takes it then.
    late: whether LIMIT_S are over.
    """

    model: str
    node: str
    held: int
    whole: int
    since_s: float
    missing: int
    late: bool = False

    @property
    def is_back(self) -> bool:
        least, share = (LATE_LOSS_BYTES, LATE_LOSS_SHARE) if self.late else (LOSS_BYTES, LOSS_SHARE)
        return self.missing <= max(least, share * self.held)

    @property
    def condition(self) -> Condition:
        missing = f"{self.missing / GIB:.1f} of {self.held / GIB:.1f} GiB of {self.model}"
        if not self.late:
            return Condition("MemoryReturns", f"Memory of an ended engine returns to {self.node}: {missing} are missing.", self.node)
        message = (
            f"{missing} have not come back to {self.node} after {LIMIT_S:.0f} s. `sparkd doctor` names what holds memory; "
            f"if no process does, restart {self.node}. Only loads that fit beside it begin there."
        )
        return Condition("MemoryNotReleased", message, self.node)


class MemoryRelease:
    """Looks at every observation; a stop, a crash and a kill are the same to it.

    room_gib: by node to which memory returns, what a load may need that begins there now.
    leaked_gib: by node, memory that counts as held since it did not return in time.
    limits: the guard's, of a node with so many bytes.
    """

    def __init__(self, journal: Journal, clock: Callable[[], float], limits: Callable[[int], MemoryLimits] = MemoryLimits.of) -> None:
        self._journal = journal
        self._clock = clock
        self._limits = limits
        # By rank_id of the ranks that live: the samples of the last BEFORE_S.
        self._living: dict[str, deque[Sample]] = {}
        # The oldest first. Those of a node that is out of sight stay: when it is back, its memory is looked at again.
        self._ended: list[Ended] = []
        self._in_sight: frozenset[str] = frozenset()
        self.room_gib: dict[str, float] = {}
        self.leaked_gib: dict[str, float] = {}

    @property
    def _returning(self) -> list[Ended]:
        return [ended for ended in self._ended if ended.node in self._in_sight]

    @property
    def missing_bytes(self) -> dict[str, int]:
        """By node, memory of engines that ended which has not come back."""
        return _by_node(self._returning)

    @property
    def conditions(self) -> tuple[Condition, ...]:
        return tuple(ended.condition for ended in self._returning)

    def look(self, observation: Observation) -> None:
        """Once in each tick, with what the nodes showed."""
        if observation.ranks is None:
            return
        now_s, readings = self._clock(), observation.readings
        self._in_sight = frozenset(readings)
        self._note_ends(observation, now_s)
        alive = [fact for fact in observation.ranks if fact.alive]
        whole = {node: reading.mem_available_bytes for node, reading in readings.items()}
        for fact in alive:
            if fact.handle.node_id in whole:
                whole[fact.handle.node_id] += _held(fact)
        self._note_living(alive, whole, now_s)
        for ended in self._returning:
            self._weigh(ended, whole[ended.node], now_s)
        returning = {ended.node for ended in self._returning if not ended.late}
        self.room_gib = {node: self._room_gib(reading) for node, reading in readings.items() if node in returning}
        leaked = _by_node([ended for ended in self._returning if ended.late])
        self.leaked_gib = {node: missing / GIB for node, missing in leaked.items()}
        for node in readings:
            metrics.RELEASE_LEAKED_BYTES.labels(node).set(leaked.get(node, 0))

    def _note_living(self, alive: Sequence[RankFact], whole: Mapping[str, int], now_s: float) -> None:
        for fact in alive:
            if fact.handle.node_id not in whole:
                continue
            samples = self._living.setdefault(fact.handle.rank_id, deque())
            samples.append(Sample(fact.handle, now_s, _held(fact), whole[fact.handle.node_id]))
            while samples[0].at_s < now_s - BEFORE_S:
                samples.popleft()

    def _note_ends(self, observation: Observation, now_s: float) -> None:
        there = {fact.handle.rank_id for fact in observation.ranks or () if fact.alive or fact.processes}
        for rank_id in self._living.keys() - there:
            handle = self._living[rank_id][-1].handle
            if handle.node_id in observation.unseen:
                continue
            samples = self._living.pop(rank_id)
            held, whole = max(sample.held for sample in samples), max(sample.whole for sample in samples)
            # Memory that earlier ends still lack is not counted for this one too.
            earlier = [ended.whole - ended.missing for ended in self._ended if ended.node == handle.node_id]
            if held > LOSS_BYTES:
                self._ended.append(Ended(handle.model, handle.node_id, held, min([whole, *earlier]), now_s, held))

    def _weigh(self, ended: Ended, whole: int, now_s: float) -> None:
        """Note how much is back. whole: what is available on the node or held by living ranks."""
        waited_s, was_late = now_s - ended.since_s, ended.late
        ended.missing = min(ended.missing, max(0, ended.whole - whole))
        ended.late = waited_s >= LIMIT_S
        node, model = ended.node, ended.model
        if ended.is_back:
            self._ended.remove(ended)
            metrics.RELEASE_SECONDS.labels(node).observe(waited_s)
            back = f"{(ended.held - ended.missing) / GIB:.1f} of {ended.held / GIB:.1f} GiB came back to {node} within {waited_s:.1f} s."
            self._journal.say("release", model, back, node=node, seconds=round(waited_s, 2))
        elif ended.late and not was_late:
            self._journal.say("release", model, ended.condition.message, node=node, missing_bytes=ended.missing)

    def _room_gib(self, reading: Reading) -> float:
        return max(0.0, (reading.mem_available_bytes - self._limits(reading.mem_total_bytes).soft) / GIB)


def _by_node(ends: Sequence[Ended]) -> dict[str, int]:
    missing: dict[str, int] = defaultdict(int)
    for ended in ends:
        missing[ended.node] += ended.missing
    return dict(missing)


def _held(fact: RankFact) -> int:
    """Bytes on the host and on the device; 0 if they are not known."""
    return (fact.host_bytes or 0) + (fact.device_bytes or 0)
