"""The measured rates between nodes: how each compares with the normal one, what is lost, and whether it proves that RDMA works."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sparkd import metrics
from sparkd.errors import StateError
from sparkd.fabric.checks import BOTH_RAILS, FAIL, OK, Finding
from sparkd.fabric.nccl_log import SOCKET, judge_rate, least_normal_gb_s
from sparkd.state.documents import Documents
from sparkd.state.rows import noun_of

log = logging.getLogger("sparkd.measures")

NCCL, GLOO = "nccl", "gloo"


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
        return least_normal_gb_s(self.rails, lan=self.lan) if self.real else None

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
    where = f"{rate.a} - {rate.b}"
    called = "NCCL" if rate.backend == NCCL else "Gloo"
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


def shown(rate: Rate) -> dict[str, Any]:
    """A rate as plain JSON, with the verdict."""
    judged = finding(rate)
    return asdict(rate) | {"idle": list(rate.idle), "normal_gb_s": rate.normal, "verdict": judged.verdict, "told": judged.evidence}


def _rails(number: int) -> str:
    return f"{number} rail{'s' if number > 1 else ''}"


def _lost(rate: Rate) -> float:
    """The missing share of the least rate that is normal."""
    return max(0.0, 1 - rate.gb_s / least_normal_gb_s(rate.rails))


def _show(rate: Rate) -> None:
    pair = sorted(rate.pair)
    metrics.FABRIC_RATE.labels(*pair).set(rate.gb_s * 1e9)
    if rate.least_normal_gb_s is not None:
        metrics.FABRIC_NORMAL_RATE.labels(*pair).set(rate.least_normal_gb_s * 1e9)
    else:
        with suppress(KeyError):  # older releases of the library raise it for a series that never was
            metrics.FABRIC_NORMAL_RATE.remove(*pair)
