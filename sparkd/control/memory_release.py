"""The release gate: on a node where an engine ended, a load begins only when MemAvailable covers it and the guard's soft limit.

On a Spark memory returns up to a minute after the process has ended, and an engine that crashes may leave 33 GB in the driver. A start in
that time runs out of memory. A free port, or a `systemctl stop` that has returned, does not show that the memory is free.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkd import metrics
from sparkd.cluster.node_tracker import Observation
from sparkd.condition import Condition
from sparkd.control.journal import Journal
from sparkd.state.nouns import RankFact, RankHandle, Reading
from sparkd.units import GIB
from workers.host.memory_limits import MemoryLimits

# A smaller change may come from any other program on the machine, not from an engine's end.
LEAST_BYTES = GIB
# Memory counts as back when 90 % of it are, but for half a GiB.
LOSS_SHARE, LOSS_BYTES = 0.1, GIB // 2
# Memory that has not come back after that long stays away. So much of it, and so large a part, closes the node.
LIMIT_S = 90.0
STUCK_BYTES, STUCK_SHARE = 4 * GIB, 0.25
# Memory that goes before the last process does belongs to the same end.
BEFORE_S = 6.0
MEMORY_NOT_RELEASED, MEMORY_RETURNS = "MemoryNotReleased", "MemoryReturns"
# Files that one sentence names.
NAMED = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """One rank at one moment, bytes. held: by the rank. whole: available on its node or held by living engines."""

    at_s: float
    held: int
    whole: int


@dataclass(slots=True)
class Ended:
    """The memory of engines that ended together on one node, bytes.

    models: their names.
    held: what they held together.
    whole: what was available on the node or held by living engines just before, less what earlier ends lacked then.
    since_s: when the last of them ended.
    missing: what has not come back. It shrinks only: memory that was back counts as back, whatever takes it then.
    stuck: whether so much was missing after LIMIT_S that the node is closed.
    """

    models: tuple[str, ...]
    held: int
    whole: int
    since_s: float
    missing: int
    stuck: bool = False

    @property
    def named(self) -> str:
        return " and ".join(self.models)

    @property
    def lacking(self) -> str:
        return f"{self.missing / GIB:.1f} of {self.held / GIB:.1f} GiB of {self.named}"


class MemoryRelease:
    """Looks at every observation; a stop, a crash and a kill are the same to it.

    room_gib: by node to which memory returns, what a load may need that begins there now.
    shut: the nodes where memory did not return, on which no load begins.
    limits: the guard's, of a node with so many bytes.
    """

    def __init__(self, journal: Journal, clock: Callable[[], float], limits: Callable[[int], MemoryLimits] = MemoryLimits.of) -> None:
        self._journal = journal
        self._clock = clock
        self._limits = limits
        # By rank_id: its handle, and what it held lately.
        self._living: dict[str, tuple[RankHandle, deque[Sample]]] = {}
        # By node, the oldest first. A node that is out of sight keeps its entries: when it is back, its memory is looked at again.
        self._ended: dict[str, list[Ended]] = {}
        self._in_sight: frozenset[str] = frozenset()
        self.room_gib: dict[str, float] = {}

    @property
    def shut(self) -> frozenset[str]:
        return frozenset(self.shortages)

    @property
    def shortages(self) -> dict[str, str]:
        """A clause for each node that is shut."""
        return {node: f"{node} lacks memory of an engine that ended" for node, ended in self._seen if ended.stuck}

    @property
    def missing_bytes(self) -> dict[str, int]:
        """By node, memory of engines that ended which has not come back."""
        missing: dict[str, int] = defaultdict(int)
        for node, ended in self._seen:
            missing[node] += ended.missing
        return missing

    @property
    def conditions(self) -> tuple[Condition, ...]:
        return tuple(
            Condition(MEMORY_NOT_RELEASED, f"{ended.lacking} have not come back to {node}; {_cure(node)}.", node)
            if ended.stuck
            else Condition(MEMORY_RETURNS, f"Memory of ended engines is being released: {ended.lacking} are missing on {node}.", node)
            for node, ended in self._seen
        )

    @property
    def _seen(self) -> list[tuple[str, Ended]]:
        return [(node, ended) for node, ends in self._ended.items() if node in self._in_sight for ended in ends]

    def left(self, handle: RankHandle, files: Sequence[Mapping[str, Any]]) -> None:
        """Report the files that a rank has left on its node (see workers.rank.lifecycle.stop)."""
        node = handle.node_id
        if removed := [file for file in files if file["removed"]]:
            size = sum(file["bytes"] for file in removed)
            message = f"sparkd removed {_named(removed)} ({_size(size)}), which it left on {node}; no process holds them."
            self._journal.say("release", handle.model, message, node=node, removed_bytes=size)
        for file in files:
            if not file["removed"]:
                cure = f"no process holds it; if it is not needed, `rm {file['path']}` on {node}"
                message = f"It may have left {file['path']} ({_size(file['bytes'])}) on {node}. It stays, because {file['why']}: {cure}."
                self._journal.say("release", handle.model, message, node=node, left_bytes=file["bytes"])

    def look(self, observation: Observation) -> None:
        """Once in each tick, with what the nodes showed."""
        if observation.ranks is None:
            return
        now_s, readings = self._clock(), readings_of(observation)
        alive: dict[str, list[RankFact]] = defaultdict(list)
        for fact in observation.ranks:
            if fact.alive:
                alive[fact.handle.node_id].append(fact)
        self._in_sight = frozenset(readings)
        self._note_ends(observation, now_s)
        self.room_gib = {}
        for node, reading in readings.items():
            whole = reading.mem_available_bytes + sum(_held(fact) or 0 for fact in alive[node])
            self._note_living(alive[node], whole, now_s)
            waits = [self._waits(node, ended, whole, alive[node], now_s) for ended in [*self._ended.get(node, ())]]
            if any(waits):
                room = reading.mem_available_bytes - self._limits(reading.mem_total_bytes).soft
                self.room_gib[node] = max(0.0, room / GIB)

    def _note_ends(self, observation: Observation, now_s: float) -> None:
        there = {fact.handle.rank_id for fact in observation.ranks or () if fact.alive or fact.processes}
        for rank_id in self._living.keys() - there:
            handle, samples = self._living[rank_id]
            if handle.node_id in observation.unseen:
                continue
            del self._living[rank_id]
            held = max((sample.held for sample in samples), default=0)
            if held < LEAST_BYTES:
                continue
            ends = self._ended.setdefault(handle.node_id, [])
            if ends and now_s - ends[-1].since_s <= BEFORE_S:
                ended = ends[-1]
                ended.models = tuple(sorted({*ended.models, handle.model}))
                ended.held, ended.missing, ended.since_s = ended.held + held, ended.missing + held, now_s
                continue
            # The memory that an earlier end still lacks is not counted for this one too.
            whole = max(sample.whole for sample in samples)
            if ends:
                whole = min(whole, ends[-1].whole - ends[-1].missing)
            ends.append(Ended((handle.model,), held, whole, now_s, held))

    def _note_living(self, ranks: Sequence[RankFact], whole: int, now_s: float) -> None:
        for fact in ranks:
            if (held := _held(fact)) is None:
                continue
            _, samples = self._living.setdefault(fact.handle.rank_id, (fact.handle, deque()))
            samples.append(Sample(now_s, held, whole))
            while samples[0].at_s < now_s - BEFORE_S:
                samples.popleft()

    def _waits(self, node: str, ended: Ended, whole: int, alive: Sequence[RankFact], now_s: float) -> bool:
        """Whether this memory still returns to the node. whole: what is available there, or held by engines that live."""
        waited_s = now_s - ended.since_s
        ended.missing = min(ended.missing, max(0, ended.whole - whole))
        model = ended.models[0] if len(ended.models) == 1 else None
        if ended.missing <= LOSS_SHARE * ended.held + LOSS_BYTES:
            self._ended[node].remove(ended)
            metrics.RELEASE_SECONDS.labels(node).observe(waited_s)
            self._show_leak(node)
            back = f"{(ended.held - ended.missing) / GIB:.1f} of {ended.held / GIB:.1f} GiB of {ended.named}"
            self._journal.say(
                "release", model, f"{back} came back to {node} within {waited_s:.1f} s.", node=node, seconds=round(waited_s, 2)
            )
            return False
        # The memory of a rank without weights yet would look like memory that does not return.
        if ended.stuck or waited_s < LIMIT_S or any(_held(fact) is None for fact in alive):
            return not ended.stuck
        if ended.missing < STUCK_BYTES or ended.missing < STUCK_SHARE * ended.held:
            # Any other program may have taken so little.
            self._ended[node].remove(ended)
            return False
        ended.stuck = True
        self._show_leak(node)
        message = f"{ended.lacking} have not come back to {node} after {waited_s:.0f} s; {_cure(node)}."
        self._journal.say("release", model, message, node=node, missing_bytes=ended.missing)
        return False

    def _show_leak(self, node: str) -> None:
        metrics.RELEASE_LEAKED_BYTES.labels(node).set(sum(ended.missing for ended in self._ended[node] if ended.stuck))


def readings_of(observation: Observation) -> dict[str, Reading]:
    """By node; of this node alone before the agents have answered."""
    readings = {node.node_id: node.reading for node in observation.nodes if node.reading}
    return readings or ({observation.reading.node_id: observation.reading} if observation.reading else {})


def _cure(node: str) -> str:
    return f"no load begins there before they are back. `sparkd doctor` names what holds memory; if no process does, restart {node}"


def _named(files: Sequence[Mapping[str, Any]]) -> str:
    """The largest come first."""
    more = f" and {len(files) - NAMED} more" if len(files) > NAMED else ""
    return f"{', '.join(str(file['path']) for file in files[:NAMED])}{more}"


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / (1 << 20):.1f} MiB"


def _held(fact: RankFact) -> int | None:
    """Bytes on the host and on the device; None if they are not known."""
    return None if fact.host_bytes is None else fact.host_bytes + (fact.device_bytes or 0)
