"""Owns what a measured rate between two nodes says: beside what is normal, what is lost, whether it proves their rails, over which links
it holds. Never measures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sparkd.fabric.checks import BOTH_RAILS, FAIL, OK, Finding
from sparkd.fabric.interfaces import Fabric, NetworkInterface
from sparkd.fabric.links import cables_of
from sparkd.fabric.nccl_log import SOCKET, judge_rate, least_normal_gb_s

NCCL, GLOO = "nccl", "gloo"
# Findings of the ranks that run which a rate has more to say about.
_TRANSPORT = ("network", "rails", "traffic")


@dataclass(frozen=True, slots=True)
class Rate:
    """A measured bandwidth between the nodes a and b (their addresses in the cluster). gb_s: 10^9 bytes/s of bus bandwidth. network: the
    network that NCCL logged, None under Gloo. rails: number of RDMA devices of a that NCCL was to use, 0 for sockets; idle: those that
    carried no data. lan: over the 10GbE port. real: over real links, which have an expected rate. sent_bytes: sum of both nodes. at_s: wall
    clock. links: one line for each link that was measured (`links`); none where unknown, as in records of an earlier release, which do not
    count any more. sockets: where rails is 0, the interfaces of a and b that carried the data."""

    a: str
    b: str
    gb_s: float
    backend: str
    network: str | None
    rails: int
    idle: tuple[str, ...]
    lan: bool
    real: bool
    sent_bytes: int
    at_s: float
    links: tuple[str, ...] = ()
    sockets: tuple[str, ...] = ()

    @property
    def pair(self) -> frozenset[str]:
        return frozenset((self.a, self.b))

    @property
    def normal(self) -> str | None:
        """GB/s, as owners of Sparks measure it (sparkd.fabric.checks)."""
        if not self.real:
            return None
        return BOTH_RAILS if self.rails > 1 else f"{self.least_normal_gb_s:g}"

    @property
    def least_normal_gb_s(self) -> float | None:
        """The least of `normal`."""
        return least_normal_gb_s(self.rails, lan=self.lan) if self.real else None

    @property
    def passed(self) -> bool:
        """Whether it proves that NCCL's RDMA works between the two, by every device that was meant to carry it."""
        return self.backend == NCCL and self.rails > 0 and self.network != SOCKET and finding(self).verdict != FAIL


def links(a: Fabric, b: Fabric, sockets: Sequence[str] = ()) -> tuple[str, ...]:
    """The identity of the links between two nodes as they are now, a line for each: interface, MAC, RDMA device, speed and addresses at
    either end. Neither the boot nor how often the carrier came and went: a ring has to serve again by itself once the power or a cable is
    back. sockets: as in Rate."""
    if sockets:
        ends = [(s, t) for s in a.interfaces for t in b.interfaces if (s.name, t.name) == (*sockets,) and s.linked and t.linked]
    else:
        ends = [(rail.a, rail.b) for cable in cables_of([a, b]) for rail in cable.sound()]
    return tuple(sorted(f"{_end(s)} - {_end(t)}" for s, t in ends))


def holds(rate: Rate, nodes: Mapping[str, Fabric]) -> bool:
    """Whether the two nodes, by address, still have the links that it was taken over, and no other rail beside them."""
    return bool(rate.links) and rate.links == links(nodes[rate.a], nodes[rate.b], rate.sockets)


def proofs(rates: Iterable[Rate], nodes: Mapping[str, Fabric]) -> frozenset[frozenset[str]]:
    """Pairs of these nodes, by address, between which a rate proves that RDMA works now."""
    return frozenset(rate.pair for rate in rates if rate.pair <= nodes.keys() and rate.passed and holds(rate, nodes))


def finding(rate: Rate, *, held: bool = True) -> Finding:
    """held: whether it holds for the links that the nodes have now."""
    where = f"{rate.a} - {rate.b}"
    called = "NCCL" if rate.backend == NCCL else "Gloo"
    if not held:
        evidence = f"{rate.gb_s:.2f} GB/s measured over other links" if rate.links else f"{rate.gb_s:.2f} GB/s measured over unknown links"
        command = f"sparkd fabric --measure {where.replace(' - ', ',')}"
        return Finding("rate", OK, where, called, evidence, f"Measure again: `{command}`.", command)
    if rate.normal is None:
        return Finding("rate", OK, where, called, f"{rate.gb_s:.2f} GB/s over virtual links, which have no normal rate")
    if rate.rails and rate.network == SOCKET:
        evidence = f"{rate.gb_s:.1f} GB/s by sockets, {rate.normal} over {_rails(rate.rails)} is normal: {_lost(rate):.0%} is lost"
        cure = "NCCL fell back although RDMA should carry it: see /dev/infiniband, memlock, and the names in `sparkd fabric --env`."
        return Finding("rate", FAIL, where, called, evidence, cure)
    judged = replace(judge_rate(rate.gb_s, rate.rails, where, lan=rate.lan), about=called)
    if judged.verdict != OK and rate.rails:
        judged = replace(judged, evidence=f"{judged.evidence}: {_lost(rate):.0%} is lost")
    if rate.idle:
        cure = "See the findings on that twin and its cable in `sparkd fabric`."
        evidence = f"{judged.evidence}; nothing went over {', '.join(rate.idle)}"
        return replace(judged, verdict=FAIL, evidence=evidence, cure=judged.cure or cure)
    return judged


def shown(rate: Rate, *, held: bool = True) -> dict[str, Any]:
    """A rate as plain JSON, with the verdict. held: see `finding`."""
    judged = finding(rate, held=held)
    own = {"idle": list(rate.idle), "links": list(rate.links), "sockets": list(rate.sockets)}
    return asdict(rate) | own | {"normal_gb_s": rate.normal, "holds": held, "verdict": judged.verdict, "told": judged.evidence}


def with_loss(proved: Iterable[Finding], rates: Iterable[Rate]) -> tuple[Finding, ...]:
    """Findings on ranks that run; one that is not ok, of a node with a measured rate, says it."""
    slowest: dict[str, Rate] = {}
    for rate in sorted(rates, key=lambda proof: -proof.gb_s):
        slowest |= {rate.a: rate, rate.b: rate}
    findings = []
    for proof in proved:
        slowest_rate = slowest.get(proof.node)
        if slowest_rate is not None and proof.verdict != OK and proof.check in _TRANSPORT:
            other = next(end for end in (slowest_rate.b, slowest_rate.a) if end != proof.node)
            beside = f" of {slowest_rate.normal}" if slowest_rate.normal else ""
            proof = replace(proof, evidence=f"{proof.evidence}; {slowest_rate.gb_s:.1f}{beside} GB/s measured to {other}")
        findings.append(proof)
    return tuple(findings)


def _end(interface: NetworkInterface) -> str:
    addresses = ",".join(sorted(str(address) for address in interface.addresses))
    device = interface.rdma.name if interface.rdma else None
    return f"{interface.name} {interface.mac} {device} {interface.speed_mbps} Mb/s {addresses}"


def _rails(number: int) -> str:
    return f"{number} rail{'s' if number > 1 else ''}"


def _lost(rate: Rate) -> float:
    """The missing share of the least rate that is normal."""
    return max(0.0, 1 - rate.gb_s / least_normal_gb_s(rate.rails))
