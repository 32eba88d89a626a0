"""Owns what a measured rate between two nodes says: beside what is normal, what is lost, whether it proves their rails. Never measures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from sparkd.fabric_findings import BOTH_RAILS, BOTH_RAILS_GB_S, FAIL, LAN_GB_S, OK, ONE_RAIL_GB_S, SOCKETS_GB_S, Finding
from sparkd.nccl_log import SOCKET, judge_rate

NCCL, GLOO = "nccl", "gloo"
# Findings of the ranks that run which a rate has more to say about.
_TRANSPORT = ("network", "rails", "traffic")


@dataclass(frozen=True, slots=True)
class Rate:
    """Between the nodes a and b, by their addresses in the cluster. gb_s: 10^9 bytes/s of bus bandwidth. network: what NCCL said that it
    took, None under Gloo. rails: RDMA devices of a that were meant to carry it, 0 where sockets were; idle: those that moved nothing. lan:
    over the 10GbE port. real: over real links, which have a normal. sent_bytes: by both nodes together. at_s: wall clock."""

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

    @property
    def pair(self) -> frozenset[str]:
        return frozenset((self.a, self.b))

    @property
    def normal(self) -> str | None:
        """GB/s, as owners of Sparks measure it (sparkd.fabric_findings)."""
        if not self.real:
            return None
        if self.rails:
            return f"{ONE_RAIL_GB_S}" if self.rails == 1 else BOTH_RAILS
        return f"{LAN_GB_S if self.lan else SOCKETS_GB_S:g}"

    @property
    def passed(self) -> bool:
        """Whether it proves that NCCL's RDMA works between the two, by every device that was meant to carry it."""
        return self.backend == NCCL and self.rails > 0 and self.network != SOCKET and finding(self).verdict != FAIL


def finding(rate: Rate, names: Mapping[str, str] | None = None) -> Finding:
    """names: of the nodes, by address."""
    known = names or {}
    where = f"{known.get(rate.a, rate.a)} - {known.get(rate.b, rate.b)}"
    called = "NCCL" if rate.backend == NCCL else "Gloo"
    if rate.normal is None:
        return Finding("rate", OK, where, called, f"{rate.gb_s:.2f} GB/s over virtual links, which have no normal")
    if rate.rails and rate.network == SOCKET:
        told = f"{rate.gb_s:.1f} GB/s by sockets, {rate.normal} over {_rails(rate.rails)} is normal: {_lost(rate):.0%} is lost"
        cure = "NCCL fell back although RDMA should carry it: see /dev/infiniband, memlock, and the names in `sparkd fabric --env`."
        return Finding("rate", FAIL, where, called, told, cure)
    judged = replace(judge_rate(rate.gb_s, rate.rails, where, lan=rate.lan), about=called)
    if judged.verdict != OK and rate.rails:
        judged = replace(judged, evidence=f"{judged.evidence}: {_lost(rate):.0%} is lost")
    if rate.idle:
        cure = "See what is said of that twin and its cable in `sparkd fabric`."
        told = f"{judged.evidence}; nothing went over {', '.join(rate.idle)}"
        return replace(judged, verdict=FAIL, evidence=told, cure=judged.cure or cure)
    return judged


def shown(rate: Rate, names: Mapping[str, str]) -> dict[str, Any]:
    """As plain JSON, with the verdict; nodes by name."""
    judged = finding(rate, names)
    own = {"a": names.get(rate.a, rate.a), "b": names.get(rate.b, rate.b), "idle": list(rate.idle)}
    return asdict(rate) | own | {"normal_gb_s": rate.normal, "verdict": judged.verdict, "told": judged.evidence}


def with_loss(proved: Iterable[Finding], rates: Iterable[Rate], names: Mapping[str, str]) -> tuple[Finding, ...]:
    """Findings on ranks that run; one that is not ok, of a node with a measured rate, says it."""
    slowest: dict[str, Rate] = {}
    for rate in sorted(rates, key=lambda one: -one.gb_s):
        slowest |= {names.get(rate.a, rate.a): rate, names.get(rate.b, rate.b): rate}
    found = []
    for one in proved:
        known = slowest.get(one.node)
        if known is not None and one.verdict != OK and one.check in _TRANSPORT:
            other = next(names.get(end, end) for end in (known.b, known.a) if names.get(end, end) != one.node)
            beside = f" of {known.normal}" if known.normal else ""
            one = replace(one, evidence=f"{one.evidence}; {known.gb_s:.1f}{beside} GB/s measured to {other}")
        found.append(one)
    return tuple(found)


def _rails(number: int) -> str:
    return f"{number} rail{'s' if number > 1 else ''}"


def _lost(rate: Rate) -> float:
    """Of the least that is normal."""
    return max(0.0, 1 - rate.gb_s / (ONE_RAIL_GB_S if rate.rails == 1 else BOTH_RAILS_GB_S[0]))
