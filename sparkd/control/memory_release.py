"""The release gate: after an engine ended, a load begins only when its memory is free. Reports memory and files that stay. Never kills.

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
from sparkd.control.journal import Ledger
from sparkd.control.returning_memory import NodeSample, RankMemory, Returning, last_held
from sparkd.state.nouns import RankFact, RankHandle, Reading
from workers.host.memory_limits import MemoryLimits

GIB = 1 << 30
# A smaller change may come from any other program on the machine, not from an engine's end.
LEAST_BYTES = GIB
LIMIT_S = 90.0
# A Spark restarts within minutes. sparkd stops telling of a node that stays away for longer: it may have been retired.
GONE_S = 600.0
# So much missing, and so large a part of it, that only a restart brings it back.
REBOOT_BYTES, REBOOT_SHARE = 4 * GIB, 0.25
# Memory that goes before the last process does belongs to the same end.
BEFORE_S = 6.0
MEMORY_NOT_RELEASED, MEMORY_RETURNS = "MemoryNotReleased", "MemoryReturns"
# Files that one sentence names.
NAMED = 3


@dataclass(slots=True)
class Pending:
    """One rank that ended.

    last: its memory just before. beside: the ranks that lived when it ended, on any node.
    cure: the advice once the limit had passed; restart: whether it is to restart the node.
    away: whether its node was unreachable by then, and has been since away_since_s; gone: whether for so long that it may never return.
    """

    model: str
    node: str
    last: RankMemory
    memory: Returning
    beside: frozenset[str] = frozenset()
    cure: str = ""
    restart: bool = False
    away: bool = False
    away_since_s: float | None = None
    gone: bool = False

    @property
    def told(self) -> str:
        """A clause for users that want to load another model there."""
        if self.away:
            return f"{self.node} is unreachable"
        if self.restart:
            return f"{self.node} is to be restarted, because memory of an engine that ended has not come back"
        return f"{self.node} lacks memory of an engine that ended, which something else holds"

    @property
    def returns(self) -> bool:
        """Whether its memory still seems to be on its way."""
        return not (self.cure or self.away)

    def kept(self, reading: Reading) -> int | None:
        """Bytes of it that the driver still has: CUDA's memory is in no line of /proc/meminfo. None if a reading lacks."""
        before, device = self.last.look.unaccounted, self.last.device
        if before is None or reading.unaccounted_bytes is None or not device:
            return None
        return max(0, min(device, reading.unaccounted_bytes - (before - device)))


class Release:
    """Looks at every observation; a stop, a crash and a kill are the same to it. `shut` says on which nodes no load may begin until they
    were seen to, `room_gib` how much one may need that begins now on a node to which memory returns.

    limits: the guard's, of a node with so many bytes.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float], limits: Callable[[int], MemoryLimits] = MemoryLimits.of) -> None:
        self._ledger = ledger
        self._clock = clock
        self._limits = limits
        # By rank_id: its handle, and what it held lately.
        self._living: dict[str, tuple[RankHandle, deque[RankMemory]]] = {}
        self._pending: list[Pending] = []
        self.room_gib: dict[str, float] = {}
        # By model and node: the files that its last rank left there and sparkd did not remove.
        self._stays: dict[tuple[str, str], str] = {}

    @property
    def shut(self) -> frozenset[str]:
        return frozenset(self.told)

    @property
    def told(self) -> dict[str, str]:
        """A clause for each node that is shut. One that may have been retired is not: if it comes back, what it lacks counts again."""
        return {one.node: one.told for one in self._stuck}

    @property
    def missing_bytes(self) -> dict[str, int]:
        """By node, memory of engines that ended which has not come back."""
        missing: dict[str, int] = defaultdict(int)
        for pending in self._pending:
            missing[pending.node] += pending.memory.missing
        return dict(missing)

    @property
    def _stuck(self) -> list[Pending]:
        return [pending for pending in self._pending if not pending.returns and not pending.gone]

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """One for each rank whose memory does not come back; else one for those whose memory is on its way."""
        if stuck := self._stuck:
            return tuple(
                Condition(
                    MEMORY_NOT_RELEASED,
                    f"The memory of {pending.model} on {pending.node} has not come back; "
                    f"{'that node is unreachable' if pending.away else pending.cure}.",
                    pending.node,
                )
                for pending in stuck
            )
        returning = [pending for pending in self._pending if pending.returns]
        if not returning:
            return ()
        nodes = {pending.node for pending in returning}
        named = ", ".join(f"{pending.model} on {pending.node}" for pending in returning)
        node = nodes.pop() if len(nodes) == 1 else None
        return (Condition(MEMORY_RETURNS, f"Memory of ended engines is being released: {named}.", node),)

    def left(self, handle: RankHandle, files: Sequence[Mapping[str, Any]]) -> None:
        """Report the files that a rank has left on its node (see workers.rank.lifecycle.stop): now, and again with memory that does not
        come back."""
        where, node = (handle.model, handle.node_id), handle.node_id
        self._stays.pop(where, None)
        if removed := [file for file in files if file["removed"]]:
            size = sum(file["bytes"] for file in removed)
            message = f"sparkd removed {_named(removed)} ({_size(size)}), which it left on {node}; no process holds them."
            self._ledger.say("release", handle.model, message, node=node, removed_bytes=size)
        if stays := [file for file in files if not file["removed"]]:
            self._stays[where] = f"{_named(stays)}, {_size(sum(file['bytes'] for file in stays))}"
            for file in stays:
                cure = f"no process holds it; if it is not needed, `rm {file['path']}` on {node}"
                message = f"It may have left {file['path']} ({_size(file['bytes'])}) on {node}. It stays, because {file['why']}: {cure}."
                self._ledger.say("release", handle.model, message, node=node, left_bytes=file["bytes"])

    def look(self, observation: Observation) -> None:
        """Once in each tick, with what the nodes showed."""
        if observation.ranks is None:
            return
        now_s, readings = self._clock(), _readings(observation)
        looks = _looks(observation.ranks, readings, now_s)
        self._note_ends(observation, now_s)
        self._note_living(observation.ranks, looks, now_s)
        alive = [fact for fact in observation.ranks if fact.alive]
        self._pending = [each for each in self._pending if self._waits(each, readings.get(each.node), looks.get(each.node), now_s, alive)]
        self.room_gib = {}
        for pending in self._pending:
            if pending.returns:
                reading = readings.get(pending.node)
                room = pending.memory.room(self._limits(reading.mem_total_bytes)) / GIB if reading else 0.0
                self.room_gib[pending.node] = min(room, self.room_gib.get(pending.node, room))

    def _note_ends(self, observation: Observation, now_s: float) -> None:
        there = {fact.handle.rank_id for fact in observation.ranks or () if fact.alive or fact.processes}
        ended = []
        for rank_id in self._living.keys() - there:
            handle, looks = self._living[rank_id]
            if handle.node_id in observation.unseen:
                continue
            del self._living[rank_id]
            last = last_held(looks)
            if last and last.bytes >= LEAST_BYTES:
                ended.append((handle, last))
        # If several ended together, the memory that comes back first counts for the smallest.
        before: dict[str, int] = defaultdict(int)
        beside = frozenset(self._living)
        for handle, last in sorted(ended, key=lambda end: -end[1].bytes):
            whole = last.look.available + last.look.living - before[handle.node_id]
            before[handle.node_id] += last.bytes
            self._pending.append(Pending(handle.model, handle.node_id, last, Returning(last.bytes, whole, now_s), beside))

    def _note_living(self, ranks: Sequence[RankFact], looks: Mapping[str, NodeSample], now_s: float) -> None:
        for fact in ranks:
            held, look = _held(fact), looks.get(fact.handle.node_id)
            if not fact.alive or held is None or look is None:
                continue
            _, lately = self._living.setdefault(fact.handle.rank_id, (fact.handle, deque()))
            lately.append(RankMemory(look, held, fact.device_bytes or 0))
            while lately[0].look.at_s < now_s - BEFORE_S:
                lately.popleft()

    def _waits(self, pending: Pending, reading: Reading | None, look: NodeSample | None, now_s: float, alive: Sequence[RankFact]) -> bool:
        """alive: ranks of all nodes. The memory of a rank without weights yet would look like memory that does not return."""
        waited_s = now_s - pending.memory.since_s
        pending.away = reading is None and waited_s >= LIMIT_S
        pending.away_since_s = None if reading is not None else now_s if pending.away_since_s is None else pending.away_since_s
        pending.gone = pending.away_since_s is not None and now_s - pending.away_since_s >= GONE_S
        if reading is None or look is None:
            return True
        pending.memory.look(look)
        held, missing = pending.memory.held, pending.memory.missing
        if pending.memory.is_back:
            metrics.RELEASE_SECONDS.labels(pending.node).observe(waited_s)
            metrics.RELEASE_LEAKED_BYTES.labels(pending.node).set(0)
            message = f"{(held - missing) / GIB:.1f} of {held / GIB:.1f} GiB came back to {pending.node} within {waited_s:.1f} s."
            self._ledger.say("release", pending.model, message, node=pending.node, seconds=round(waited_s, 2))
            return False
        there = [fact for fact in alive if fact.handle.node_id == pending.node]
        if waited_s < LIMIT_S or pending.cure or any(_held(fact) is None for fact in there):
            return True
        needs_restart = missing >= REBOOT_BYTES and missing >= REBOOT_SHARE * held
        if not needs_restart and any(fact.handle.rank_id not in pending.beside for fact in there):
            # Free memory sufficed for another load, so no load waits, and so small a loss cannot be separated from that load's own memory.
            return False
        metrics.RELEASE_LEAKED_BYTES.labels(pending.node).set(missing)
        in_driver = pending.kept(reading)
        who = "" if in_driver is None else f", {in_driver / GIB:.1f} of them in the driver"
        if not needs_restart:
            pending.cure = "no load waits for it any more"
        elif in_driver is not None and in_driver < REBOOT_BYTES:
            pending.cure = (
                "other processes or files in /dev/shm hold it (`sparkd doctor` names them), and no load begins there before it is back"
            )
        else:
            pending.cure, pending.restart = "no load begins there before it was restarted", True
        if stays := self._stays.get((pending.model, pending.node)):
            pending.cure += f", and it may have left {stays}"
        lacking = f"{missing / GIB:.1f} of {held / GIB:.1f} GiB"
        message = f"{lacking} have not come back to {pending.node} after {waited_s:.0f} s{who}: {pending.cure}."
        self._ledger.say("release", pending.model, message, node=pending.node, missing_bytes=missing, driver_bytes=in_driver)
        return needs_restart


def _named(files: Sequence[Mapping[str, Any]]) -> str:
    """The largest come first."""
    more = f" and {len(files) - NAMED} more" if len(files) > NAMED else ""
    return f"{', '.join(str(file['path']) for file in files[:NAMED])}{more}"


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / (1 << 20):.1f} MiB"


def _held(fact: RankFact) -> int | None:
    """Bytes on the host and on the device, as far as they are known."""
    return None if fact.host_bytes is None else fact.host_bytes + (fact.device_bytes or 0)


def _looks(ranks: Sequence[RankFact], readings: Mapping[str, Reading], now_s: float) -> dict[str, NodeSample]:
    """By node, of those with a reading."""
    living: dict[str, int] = defaultdict(int)
    for fact in ranks:
        if fact.alive:
            living[fact.handle.node_id] += _held(fact) or 0
    return {
        node: NodeSample(now_s, reading.mem_available_bytes, living[node], reading.unaccounted_bytes) for node, reading in readings.items()
    }


def _readings(observation: Observation) -> Mapping[str, Reading]:
    readings = {node.node_id: node.reading for node in observation.nodes if node.reading}
    return readings or ({observation.reading.node_id: observation.reading} if observation.reading else {})
