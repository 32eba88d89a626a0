"""The measured rates between nodes: how each compares with the normal one, what is lost, and whether it proves that RDMA works."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sparkd import metrics
from sparkd.errors import StateError
from sparkd.fabric.checks import BOTH_RAILS, BOTH_RAILS_GB_S, FAIL, LAN_GB_S, OK, ONE_RAIL_GB_S, SOCKETS_GB_S, WARN, Finding
from sparkd.fabric.nccl_log import SOCKET
from sparkd.state.documents import Documents
from sparkd.state.rows import noun_of

log = logging.getLogger("sparkd.measures")

NCCL, GLOO = "nccl", "gloo"
# Shares of the least normal rate, ours: owners' good runs differ by about 15 %.
FINE_SHARE, FAIL_SHARE = 0.85, 0.5


@dataclass(frozen=True, slots=True)
class Rate:
    """A measured bandwidth between the nodes a and b (their addresses in the cluster). It counts until the next measurement.

    gb_s: 10^9 bytes/s of bus bandwidth
    network: the network that NCCL logged, None under Gloo
    rails: number of RDMA devices of a that NCCL was to use, 0 for sockets
    idle: those that carried no data
    lan: over the 10GbE port
    real: over real links, which have an expected rate
    sent_bytes: sum of both nodes
    at_s: wall clock
    """

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
        """GB/s, as owners of Sparks measure it (sparkd.fabric.checks)."""
        if not self.real:
            return None
        return BOTH_RAILS if self.rails > 1 else f"{self.least_normal_gb_s:g}"

    @property
    def least_normal_gb_s(self) -> float | None:
        """The least of `normal`."""
        if not self.real:
            return None
        if self.rails:
            return ONE_RAIL_GB_S if self.rails == 1 else BOTH_RAILS_GB_S[0]
        return LAN_GB_S if self.lan else SOCKETS_GB_S

    @property
    def passed(self) -> bool:
        """Whether it proves that NCCL's RDMA works between the two, by every device that was meant to carry it."""
        return self.backend == NCCL and self.rails > 0 and self.network != SOCKET and finding(self).verdict != FAIL


class RateBook:
    """The last rate of each pair of nodes."""

    def __init__(self, state_dir: Path) -> None:
        self._kept = Documents(state_dir, "rates", partial(noun_of, Rate))
        self._rates = {rate.pair: rate for rate in self._kept.all().values()}
        for rate in self._rates.values():
            _show(rate)

    def all(self) -> list[Rate]:
        return list(self._rates.values())

    def proved(self) -> frozenset[frozenset[str]]:
        return proofs(self._rates.values())

    def keep(self, rate: Rate) -> None:
        """Keep it in place of the pair's earlier one; until the daemon ends where the database cannot be written."""
        self._rates[rate.pair] = rate
        _show(rate)
        try:
            self._kept.put(" ".join(sorted(rate.pair)), asdict(rate))
        except StateError as error:
            log.warning("a measured rate is not kept: %s", error.message)


def proofs(rates: Iterable[Rate]) -> frozenset[frozenset[str]]:
    """Pairs of nodes, by address, between which a rate proves that RDMA works."""
    return frozenset(rate.pair for rate in rates if rate.passed)


def finding(rate: Rate) -> Finding:
    """The rate beside what is normal."""
    where = f"{rate.a} - {rate.b}"
    called = "NCCL" if rate.backend == NCCL else "Gloo"
    if rate.least_normal_gb_s is None:
        return Finding("rate", OK, where, called, f"{rate.gb_s:.2f} GB/s over virtual links, which have no normal rate")
    share = rate.gb_s / rate.least_normal_gb_s
    rails = f"{rate.rails} rail{'s' if rate.rails > 1 else ''}"
    lost = f": {1 - share:.0%} is lost"
    if rate.rails and rate.network == SOCKET:
        evidence = f"{rate.gb_s:.1f} GB/s by sockets, {rate.normal} over {rails} is normal{lost if share < 1 else ''}"
        cure = "NCCL fell back although RDMA should carry it: see /dev/infiniband, memlock, and the names in `sparkd fabric --env`."
        return Finding("rate", FAIL, where, called, evidence, cure)
    way = rails if rate.rails else "sockets over 10GbE" if rate.lan else "sockets over the ConnectX-7"
    evidence, cure = f"{rate.gb_s:.1f} GB/s over {way}, {rate.normal} is normal", ""
    verdict = OK if share >= FINE_SHARE else WARN if share >= FAIL_SHARE else FAIL
    if verdict != OK and rate.rails:
        evidence += lost
        cure = "Look at MTU, speed and both twins in `sparkd fabric`; a card that came up wrong (13 Gb/s) needs all power cut for a minute."
    elif verdict != OK:
        cure = "Look at the link's MTU and speed in `sparkd fabric`, and at its other traffic."
    if rate.idle:
        verdict = FAIL
        evidence += f"; nothing went over {', '.join(rate.idle)}"
        cure = cure or "See the findings on that twin and its cable in `sparkd fabric`."
    return Finding("rate", verdict, where, called, evidence, cure)


def shown(rate: Rate) -> dict[str, Any]:
    """A rate as plain JSON, with the verdict."""
    judged = finding(rate)
    return asdict(rate) | {"idle": list(rate.idle), "normal_gb_s": rate.normal, "verdict": judged.verdict, "told": judged.evidence}


def _show(rate: Rate) -> None:
    pair = sorted(rate.pair)
    metrics.FABRIC_RATE.labels(*pair).set(rate.gb_s * 1e9)
    if rate.least_normal_gb_s is not None:
        metrics.FABRIC_NORMAL_RATE.labels(*pair).set(rate.least_normal_gb_s * 1e9)
    else:
        with suppress(KeyError):  # older releases of the library raise it for a series that never was
            metrics.FABRIC_NORMAL_RATE.remove(*pair)
