"""Finds how nodes are linked: who is cabled to whom, over which rails, what tensor parallelism may use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from itertools import combinations

from sparkd.fabric.checks import BOTH_RAILS, FAIL, LAN_GB_S, OK, ONE_RAIL_GB_S, SOCKETS_GB_S, WARN, Finding, findings
from sparkd.fabric.interfaces import GOOD_MTU, LINK_LOCAL, Cage, Fabric, NetworkInterface

ALONE, PAIR, CHAIN, RING, SWITCH, APART = "alone", "pair", "chain", "ring", "switch", "apart"


@dataclass(frozen=True, slots=True)
class LinkRail:
    """A twin here and its peer at the other end, in one subnet.

    problem: what makes it useless, None where it is sound
    cure: of the problem
    """

    a: NetworkInterface
    b: NetworkInterface
    network: IPv4Network
    problem: str | None
    cure: str = ""

    @property
    def rdma(self) -> bool:
        return self.problem is None and self.a.carries_rdma and self.b.carries_rdma


@dataclass(frozen=True, slots=True)
class Link:
    """A cable.

    a, b: nodes' names
    rails: empty where the ends have no subnet in common
    seen: an end has met the other's MAC address; else the subnets alone say so
    """

    a: str
    a_cage: Cage
    b: str
    b_cage: Cage
    rails: tuple[LinkRail, ...]
    seen: bool

    def sound(self, *, rdma: bool = True) -> tuple[LinkRail, ...]:
        """The ports that can carry traffic; rdma: by RDMA. Without it a cable between machines that have no RDMA at all will do."""
        return tuple(rail for rail in self.rails if (rail.rdma if rdma else rail.problem is None))


def cables_of(nodes: Sequence[Fabric]) -> tuple[Link, ...]:
    """Between each two nodes, in the nodes' order. Through a switch a cage has one to every node there.

    A neighbour's MAC address proves a cable. A subnet in common is believed where nothing that was seen contradicts it; link-local
    addresses are all in one subnet, so they say nothing by themselves.
    """
    cables: list[Link] = []
    for a, b in combinations(nodes, 2):
        between: list[Link] = []
        ends = [(x, y, _met(a, x, b, y)) for x in a.cages for y in b.cages if x.linked and y.linked]
        seen = [(x, y) for x, y, met in ends if met]
        for x, y, met in ends:
            contradicted = any((x is p) != (y is q) for p, q in seen)
            if met or (not contradicted and any(_common(s, t, met) for s in x.twins for t in y.twins)):
                between.append(Link(a.node, x, b.node, y, _rails(x, y, met), met))
        cables += [cable for cable in between if cable.rails or not _is_echo(cable, between)]
    return tuple(cables)


def topology(nodes: Sequence[Fabric], cables: Sequence[Link]) -> str:
    """How they hang together. Two nodes through a switch look like two with a cable, and that is all the same to them."""
    if len(nodes) < 2:
        return ALONE
    links = {frozenset((cable.a, cable.b)) for cable in cables}
    if not _hang_together([node.node for node in nodes], links):
        return APART
    ports = [end for cable in cables for end in ((cable.a, id(cable.a_cage), cable.b), (cable.b, id(cable.b_cage), cable.a))]
    reach: dict[tuple[str, int], set[str]] = {}
    for node, cage, other in ports:
        reach.setdefault((node, cage), set()).add(other)
    if any(len(others) > 1 for others in reach.values()):
        return SWITCH
    if len(nodes) == 2:
        return PAIR
    degrees = [sum(1 for link in links if node.node in link) for node in nodes]
    return RING if all(degree == 2 for degree in degrees) else CHAIN


def rails(nodes: Sequence[Fabric], *, rdma: bool = True, ring_proved: bool = False) -> tuple[bool, str]:
    """Whether tensor parallelism over exactly these nodes has a sound rail between each two, and why not. rdma: False for engines on
    CPUs, whose Gloo knows sockets only.

    ring_proved: whether a live NCCL test over a ring has passed; it has too where one has between each two (Fabric.proved). Owners and
    NVIDIA contradict each other on whether RDMA works there.
    """
    cables = cables_of(nodes)
    for a, b in combinations(nodes, 2):
        between = [cable for cable in cables if (cable.a, cable.b) == (a.node, b.node)]
        if not any(cable.sound(rdma=rdma) for cable in between):
            return False, f"{a.node} and {b.node} have {_unsound(between, rdma)}"
    if rdma and len(nodes) > 2 and topology(nodes, cables) != SWITCH and not (ring_proved or _proved(nodes)):
        names = ", ".join(node.node for node in nodes)
        return (
            False,
            f"{names} form a ring without a switch, where RDMA works on some Sparks only: a live NCCL test must pass first",
        )
    return True, ""


def expects_rdma(nodes: Sequence[Fabric]) -> bool:
    """Whether the links are real ones."""
    return any(not cage.virtual for node in nodes for cage in node.cages)


def teams(nodes: Sequence[Fabric], size: int, *, rdma: bool = True) -> tuple[tuple[str, ...], ...]:
    """Every choice of `size` nodes that tensor parallelism may spread over, the nodes' order kept."""
    chosen = combinations(nodes, size)
    return tuple(tuple(node.node for node in group) for group in chosen if rails(group, rdma=rdma)[0])


def unlinked(nodes: Sequence[Fabric], *, rdma: bool = True) -> dict[int, str]:
    """By a number of nodes, from two to all: why no choice of so many may carry tensor parallelism, and what helps, without the last full
    stop. Numbers for which there is a choice are left out. See sparkd.capacity.fit.Unlinked.
    """
    reasons = {}
    for size in range(2, len(nodes) + 1):
        if not teams(nodes, size, rdma=rdma):
            group = nodes[:size]
            cure, sockets = _cure(group, rdma), _by_sockets(group, rdma)
            told = cure if sockets in cure else f"{cure} {sockets}."
            reasons[size] = f"{rails(group, rdma=rdma)[1]}. {told}".rstrip(".")
    return reasons


def cable_findings(nodes: Sequence[Fabric], cables: Sequence[Link], *, rdma: bool = True) -> tuple[Finding, ...]:
    """The findings on the nodes together; none where there is one."""
    if len(nodes) < 2:
        return ()
    return (
        *_duplicates(nodes),
        *(finding for cable in cables for finding in _of_cable(cable, rdma)),
        *_crossed(nodes, cables),
        *_strangers(nodes, cables),
        *_together(nodes, cables, rdma),
    )


def _met(a: Fabric, x: Cage, b: Fabric, y: Cage) -> bool:
    return any(a.sees(s, t.mac) or b.sees(t, s.mac) for s in x.twins for t in y.twins if s.mac and t.mac)


def _proved(nodes: Sequence[Fabric]) -> bool:
    return all(b.node in a.proved for a, b in combinations(nodes, 2))


def _is_echo(cable: Link, between: Sequence[Link]) -> bool:
    """Through a switch that all four ports share, each end meets both of the other's: what has no subnet there is no cable, where both
    ends have one that has."""
    railed = [other for other in between if other.rails]
    return any(other.a_cage is cable.a_cage for other in railed) and any(other.b_cage is cable.b_cage for other in railed)


def _common(s: NetworkInterface, t: NetworkInterface, met: bool) -> IPv4Network | None:
    network = s.shares(t) if s.linked and t.linked else None
    return None if network == LINK_LOCAL and not met else network


def _rails(x: Cage, y: Cage, met: bool) -> tuple[LinkRail, ...]:
    """Each twin with the first of the other end that is in a subnet of its own and has no rail yet."""
    shared: list[LinkRail] = []
    for s in x.twins:
        for t in y.twins:
            network = _common(s, t, met)
            if network and not any(rail.a is s or rail.b is t for rail in shared):
                shared.append(LinkRail(s, t, network, *_problem(s, t)))
    return tuple(shared)


def _problem(s: NetworkInterface, t: NetworkInterface) -> tuple[str | None, str]:
    """(problem, cure)"""
    if twice := {address.ip for address in s.addresses} & {address.ip for address in t.addresses}:
        return f"both ends have {min(twice)}", "Give each end an address of its own."
    if s.mtu != t.mtu:
        return f"MTU {s.mtu} at one end and {t.mtu} at the other", f"Set mtu: {GOOD_MTU} at both ends."
    return None, ""


def _of_cable(cable: Link, rdma: bool) -> Iterator[Finding]:
    node, about = f"{cable.a} - {cable.b}", f"{cable.a_cage.label} - {cable.b_cage.label}"
    how = "the ends have seen each other" if cable.seen else "by their subnets"
    if not cable.rails:
        evidence = f"{how}, and no subnet is in common: {_subnets(cable.a_cage)} and {_subnets(cable.b_cage)}"
        cure = "Give both ends of each twin's rail addresses in one subnet: else `ibv_modify_qp failed with 110 Connection timed out`."
        yield Finding("pairing", FAIL, node, about, evidence, cure)
        return
    for problem, cure in dict.fromkeys((rail.problem, rail.cure) for rail in cable.rails if rail.problem):
        yield Finding("ends", FAIL, node, about, problem, cure)
    speeds = {(rail.a.speed_mbps, rail.b.speed_mbps) for rail in cable.rails if rail.a.physical and rail.a.speed_mbps != rail.b.speed_mbps}
    for here, there in speeds:
        cure = "Force one speed, 200G-baseCR4, on both ports of the switch, or reseat the cable."
        yield Finding("ends", WARN, node, about, f"{here} Mb/s at one end and {there} at the other", cure)
    sound = cable.sound(rdma=rdma)
    meant = 1 if cable.a_cage.virtual else max(2, len(cable.rails))
    evidence = f"{len(sound)} of {meant} rail{'s' if meant > 1 else ''} sound, {how}"
    if not sound:
        left = f" for RDMA, and {SOCKETS_GB_S} GB/s by sockets are left" if cable.sound(rdma=False) else ""
        yield Finding("rails", FAIL, node, about, evidence, f"No rail is sound{left}: fix the findings on its twins and ends.")
    elif len(sound) < meant:
        cure = f"One rail of two is sound, which is {ONE_RAIL_GB_S} of {BOTH_RAILS} GB/s: see the findings on the other twin."
        yield Finding("rails", WARN, node, about, evidence, cure)
    else:
        yield Finding("rails", OK, node, about, evidence)


def _crossed(nodes: Sequence[Fabric], cables: Sequence[Link]) -> Iterator[Finding]:
    """NCCL pairs the devices of two nodes by their order, which is that of the PCI addresses: an owner's `ibv_modify_qp` time-outs came
    from a list that began with another device (AINode 0.5.11, release notes)."""
    for a, b in combinations(nodes, 2):
        between = [rail for cable in cables if (cable.a, cable.b) == (a.node, b.node) for rail in cable.rails]
        there = [rail.b.pci or "" for rail in sorted(between, key=lambda rail: rail.a.pci or "")]
        if there != sorted(there):
            evidence = ", ".join(f"{rail.a.name} - {rail.b.name}" for rail in between)
            cure = "Plug each cable into the same cage at both ends, and give each twin a subnet with the same twin of the other end."
            yield Finding("crossed", WARN, f"{a.node} - {b.node}", "QSFP", evidence, cure)


def _duplicates(nodes: Sequence[Fabric]) -> Iterator[Finding]:
    owners: dict[IPv4Address, list[tuple[str, str]]] = {}
    for node in nodes:
        for interface in (*node.twins, *node.lans, *node.wifis):
            for address in interface.addresses:
                owners.setdefault(address.ip, []).append((node.node, interface.name))
    for ip, held in owners.items():
        names = list(dict.fromkeys(node for node, _ in held))
        if len(names) > 1:
            holders = ", ".join(f"{name} of {node}" for node, name in held)
            yield Finding("duplicate", FAIL, " - ".join(names), str(ip), f"{ip} is on {holders}", "Give each node an address of its own.")


def _strangers(nodes: Sequence[Fabric], cables: Sequence[Link]) -> Iterator[Finding]:
    """A cage with a link that leads to none of the nodes."""
    used = {(node, id(cage)) for cable in cables for node, cage in ((cable.a, cable.a_cage), (cable.b, cable.b_cage))}
    for node in nodes:
        for cage in (cage for cage in node.cages if cage.linked and (node.node, id(cage)) not in used):
            names = {twin.name for twin in cage.twins}
            met = sorted({f"{address} {mac}" for name, address, mac in node.neighbours if name in names})
            evidence = f"it has a link, and its neighbours are {', '.join(met[:4]) if met else 'unknown'}"
            cure = (
                "To use the Spark at the other end, run `sparkd join` there (`sparkd token` here prints the command); if it should be "
                "one of these nodes, check that the addresses of both ends are in one subnet, and ping it."
            )
            yield Finding("peer", WARN, node.node, cage.label, evidence, cure)


def _together(nodes: Sequence[Fabric], cables: Sequence[Link], rdma: bool) -> Iterator[Finding]:
    names, about = ", ".join(node.node for node in nodes), f"TP={len(nodes)}"
    fine, reason = rails(nodes, rdma=rdma)
    if fine:
        yield Finding("parallel", OK, names, about, f"a sound rail between each two ({topology(nodes, cables)})")
        return
    pairs = teams(nodes, 2, rdma=rdma)
    proved = len(nodes) > 2 and rails(nodes, rdma=rdma, ring_proved=True)[0]
    test = "`sparkd fabric --measure all`, a live NCCL test, proves or disproves it; "
    left = _by_sockets(nodes, rdma) or f"Otherwise only the LAN is left, about {LAN_GB_S:g} GB/s"
    cure = test if proved else f"{left}; "
    cure += f"TP=2 may use {' or '.join(' + '.join(pair) for pair in pairs)}." if pairs else "pipeline parallelism needs far less."
    # Nodes without any link may serve a model each, so a missing link is no failure there.
    meant = any(cage.linked for node in nodes for cage in node.cages)
    yield Finding("parallel", FAIL if meant and not pairs else WARN, names, about, reason, cure)


def _by_sockets(nodes: Sequence[Fabric], rdma: bool) -> str:
    """The way that is left where rails lack RDMA alone, without the last full stop; else nothing. In a ring sockets take the LAN."""
    if not (rdma and rails(nodes, rdma=False)[0] and topology(nodes, cables_of(nodes)) in (PAIR, SWITCH)):
        return ""
    return f"Without RDMA, `env: {{NCCL_NET: Socket}}` in the model's entry gives {SOCKETS_GB_S} GB/s by sockets over the cable"


def _cure(group: Sequence[Fabric], rdma: bool) -> str:
    """The worst: a fault of the links between them, else of a node, else what is left to do without."""
    links = cable_findings(group, cables_of(group), rdma=rdma)
    wrong = [finding for finding in links if finding.verdict == FAIL and finding.check not in ("rails", "parallel")]
    wrong += [finding for node in group for finding in findings(node) if finding.verdict == FAIL]
    return next((finding.cure for finding in (*wrong, *links[::-1]) if finding.cure), "")


def _unsound(between: Sequence[Link], rdma: bool) -> str:
    if not between:
        return "no cable between them"
    if not any(cable.rails for cable in between):
        return "a cable, and no subnet in common on it"
    problem = next((rail.problem for cable in between for rail in cable.rails if rail.problem), None)
    if problem or not rdma:
        return f"a cable without a sound rail: {problem}"
    return "a cable without RDMA on any rail"


def _hang_together(names: Sequence[str], links: set[frozenset[str]]) -> bool:
    reached, waiting = set(names[:1]), list(names[:1])
    while waiting:
        here = waiting.pop()
        for link in (link for link in links if here in link):
            waiting += link - reached
            reached |= link
    return reached == set(names)


def _subnets(cage: Cage) -> str:
    return " ".join(str(address) for twin in cage.twins for address in twin.addresses) or "none"
