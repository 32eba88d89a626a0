"""Tracks which nodes are in sight, and for how long one that is out of sight counts as unknown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from sparkd.condition import Condition
from sparkd.errors import ClusterError, CodeDiffers
from sparkd.state.nouns import Progress, RankFact, Reading
from sparkd.state.rows import noun_of
from sparkd.state.snapshot import NodeView
from workers.rank.signatures import Diagnosis

# A new head ends the raylets of the old one, and they are started again: up to 45 s on two busy cores, with Ray 2.60.
NODE_GRACE_S = 60.0
# So long after its agent was last heard a node that only accepts connections counts as alive: Ray starts an agent anew within that.
ACCEPTED_S = 20.0
# Neither a look nor the pause after it lasts longer in a daemon that runs; a longer time was its own (a signal held it), and no node
# was silent in it.
HELD_S = 5.0
# By how much two nodes' clocks may differ. Ages of readings are worked out on each node; what needs the clock is certificates, tokens of a
# hub and whoever reads two logs.
CLOCK_S = 5.0


@dataclass(frozen=True, slots=True)
class Observation:
    """The state of the nodes at one moment.

    ranks: None where no node could be observed
    reading: this node's
    connected: whether Ray can place a model
    unseen: nodes that answered a moment ago and do not answer now: their ranks are unknown, not gone
    dark_s: seconds without any sign of life of such a node, not even a refused connection
    no_raylet: the nodes that refuse the connection: the node is up, its raylet is not
    """

    ranks: tuple[RankFact, ...] | None
    reading: Reading | None
    connected: bool
    nodes: tuple[NodeView, ...] = ()
    unseen: frozenset[str] = frozenset()
    dark_s: Mapping[str, float] = field(default_factory=dict)
    no_raylet: frozenset[str] = frozenset()
    trouble: Condition | None = None
    cluster: Mapping[str, Any] = field(default_factory=dict)

    @property
    def readings(self) -> dict[str, Reading]:
        """By node; of this node alone before the agents have answered."""
        readings = {node.node_id: node.reading for node in self.nodes if node.reading}
        return readings or ({self.reading.node_id: self.reading} if self.reading else {})

    def of_start(self, start: str) -> tuple[RankFact, ...]:
        """The ranks of one start, by number."""
        return tuple(sorted((fact for fact in self.ranks or () if fact.handle.start == start), key=lambda fact: fact.handle.rank))


@dataclass(frozen=True, slots=True)
class NodeObservation:
    """One node at one moment."""

    node: NodeView
    ranks: tuple[RankFact, ...]


class NodeTracker:
    """Remembers nodes that do not answer. Their engines are unknown, not gone: starting one elsewhere would start it twice.

    A node counts as gone once it has not answered for NODE_GRACE_S. The time does not run while the daemon cannot observe any node.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[NodeView, float]] = {}
        self._heard_s: dict[str, float] = {}
        self._told_s: dict[str, float] = {}  # by its agent, not by its kernel
        self._began_s: float | None = None
        self.no_raylet: frozenset[str] = frozenset()

    def begin(self, now_s: float) -> None:
        """Called before and after each look. A pause of the daemon itself (over HELD_S) does not count against any node."""
        gap_s, self._began_s = now_s - (now_s if self._began_s is None else self._began_s), now_s
        if gap_s > HELD_S:
            self._heard_s = {address: at_s + gap_s for address, at_s in self._heard_s.items()}
            self._told_s = {address: at_s + gap_s for address, at_s in self._told_s.items()}
            self._seen = {address: (node, at_s + gap_s) for address, (node, at_s) in self._seen.items()}

    def heard(self, address: str, now_s: float, *, refused: bool) -> None:
        """Note a sign of life of a node whose agent did not answer. refused: its raylet's port refused the connection.

        An accepted connection proves little: the kernel of a frozen machine accepts it too. It counts for ACCEPTED_S.
        """
        if not refused and now_s - self._told_s.get(address, now_s) > ACCEPTED_S:
            return
        self._heard_s[address] = now_s
        self.no_raylet = self.no_raylet | {address} if refused else self.no_raylet - {address}

    def stays(self, address: str, now_s: float) -> None:
        """Its agent answers and cannot look: it is not given up, and what runs there is unknown for as long."""
        self._told_s[address] = now_s
        self.heard(address, now_s, refused=False)
        if address in self._seen:
            self._seen[address] = self._seen[address][0], now_s

    def awaits(self, address: str) -> bool:
        """Whether it was in sight a moment ago."""
        return address in self._seen

    def dark_s(self, address: str, now_s: float) -> float:
        """Seconds since a node's last sign of life; 0 for a node that has never given one."""
        return now_s - self._heard_s.get(address, now_s)

    def expect(self, addresses: Iterable[str], now_s: float) -> None:
        """An earlier daemon left ranks there: they count as seen now."""
        for address in addresses:
            self._seen[address] = NodeView(address, address, False, False, None, None, 0.0), now_s

    def look(self, seen: Sequence[NodeView], *, could_look: bool, now_s: float) -> tuple[NodeView, ...]:
        """The nodes that are missing among `seen`, as they were seen last and without a reading."""
        fresh = {node.node_id: (node, now_s) for node in seen}
        self._heard_s |= dict.fromkeys(fresh, now_s)
        self._told_s |= dict.fromkeys(fresh, now_s)
        self.no_raylet -= fresh.keys()
        earlier = {node_id: (node, at_s if could_look else now_s) for node_id, (node, at_s) in self._seen.items()}
        self._seen = {node_id: last for node_id, last in (earlier | fresh).items() if now_s - last[1] <= NODE_GRACE_S}
        return tuple(replace(node, agent=False, reading=None) for node_id, (node, _) in sorted(self._seen.items()) if node_id not in fresh)


def missing_condition(missing: Sequence[NodeView]) -> Condition | None:
    """The condition that an operator reads; None where every node is in sight."""
    if not missing:
        return None
    named = ", ".join(node.address for node in missing)
    message = f"{named} is not responding. Its models are considered lost after {NODE_GRACE_S:.0f} s."
    return Condition("NodeUnseen", message, missing[0].address if len(missing) == 1 else None)


def unreadable_condition(of: str, error: str, node: str) -> Condition:
    """The condition for a report of a node that cannot be used. of: what it is about."""
    message = f"The report of {of} cannot be used ({error}). sparkd leaves its engines alone: check that node."
    return Condition("NodeUnreadable", message, node)


def unusable_condition(unmet: Mapping[str, ClusterError], ahead_s: Mapping[str, float]) -> Condition | None:
    """The condition of nodes that have joined and cannot be used as they are.

    unmet: what keeps a node from it
    ahead_s: by node, seconds by which its clock is ahead of this one's
    """
    for node, error in unmet.items():
        if isinstance(error, CodeDiffers):
            return Condition(error.reason, error.message, node)
        cure = "Check the firewall between the nodes (deploy/nftables.conf), and sparkd-ray there."
        return Condition("NodeUnmet", f"{node} has joined Ray, but its agent cannot be reached. {error.message} {cure}", node)
    for node, ahead in ahead_s.items():
        if abs(ahead) > CLOCK_S:
            how = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'}"
            return Condition("ClockSkew", f"The clock of {node} is {how} this node's: `timedatectl set-ntp true` on both.", node)
    return None


def reading(node_id: str, sample: Mapping[str, Any], node_now_s: float) -> Reading:
    """`node_now_s` is the node's own clock at the moment of answering: the difference is the reading's age, whatever our clock says."""
    return noun_of(Reading, {**sample, "node_id": node_id, "age_s": max(0.0, node_now_s - sample["at_s"])})


def facts_of(ranks: Iterable[Mapping[str, Any]]) -> tuple[tuple[RankFact, ...], dict[str, str]]:
    """The facts of an agent's ranks, each read by itself, and the reason by the id of each that this release cannot use."""
    facts, left_out = [], {}
    for raw in ranks:
        try:
            facts.append(_fact_of(raw))
        except ValueError as error:
            left_out[str(raw["rank_id"])] = str(raw.get("error") or error)
    return tuple(facts), left_out


def _fact_of(raw: Mapping[str, Any]) -> RankFact:
    """Raises ValueError if the rank's handle cannot be used. Progress or a diagnosis that cannot be used is left out; the rank stays."""
    facts = {"exit_code": None, "progress": {}} | {name: value for name, value in raw.items() if value is not None}
    for name, noun, nothing in (("progress", Progress, {}), ("diagnosis", Diagnosis, None)):
        try:
            if name in facts:
                noun_of(noun, facts[name])
        except ValueError:
            facts[name] = nothing
    return noun_of(RankFact, {name: facts[name] for name in _OF_A_FACT if name in facts})


_OF_A_FACT = tuple(field.name for field in fields(RankFact))
