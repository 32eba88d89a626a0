"""Owns whether an engine over several nodes still computes while requests run, by its own counters and its ranks' CPU time. Never ends it.

An engine that has lost a rank without a word (a driver that hangs, packets that are dropped) answers /health with 200 for minutes; its
counters stand still at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sparkd.record import Record
from sparkd.scrape import page_of, samples
from sparkd.state import STARTING, ModelState
from sparkd.upstream import Upstream

# Not a step for so long, and no rank computes: 1 s more than the longest step seen on a Spark (8,192 tokens of a prompt).
IDLE_S = 8.0
# Ranks that use CPU time may compile a kernel, or wait for a GPU in a loop.
BUSY_S = 120.0
# Of one core; a process that waits wakes up now and then.
IDLE_SHARE = 0.2

_STEPS = tuple(f"vllm:{name}" for name in ("generation_tokens_total", "prompt_tokens_total", "iteration_tokens_total_sum"))
_IN_HAND = ("vllm:num_requests_running", "vllm:num_requests_waiting")


@dataclass(frozen=True, slots=True)
class Beat:
    """The last sign that an engine moved. steps: the sum of its counters, None before it told any; cpu_s: by rank, at that moment."""

    steps: float | None
    at_s: float
    cpu_s: Mapping[int, float]


class Pulse:
    """`spawn(work, name)` runs a task beside the loop; `clock` is monotonic, seconds."""

    def __init__(
        self,
        spawn: Callable[[Any, str], object],
        clock: Callable[[], float],
        page_of: Callable[[Upstream], Awaitable[str | None]] = page_of,
    ) -> None:
        self._spawn = spawn
        self._clock = clock
        self._page_of = page_of
        self._beats: dict[str, Beat] = {}
        self._asking: set[str] = set()

    def look(self, records: Iterable[Record]) -> None:
        """Ask every engine over several nodes that has requests in hand; what it says is known at a later look."""
        for record in records:
            if not _works(record):
                self._beats.pop(record.name, None)
                continue
            self._beats.setdefault(record.name, self._beat(record, None))
            if record.name not in self._asking:
                self._asking.add(record.name)
                self._spawn(self._ask(record), f"pulse of {record.name}")

    def frozen(self, record: Record) -> str | None:
        """The sentence of its failure; None while it moves, or may."""
        beat = self._beats.get(record.name)
        if beat is None:
            return None
        silent_s, now = self._clock() - beat.at_s, _cpu_s(record)
        is_idle = all(used - beat.cpu_s.get(rank, 0.0) <= IDLE_SHARE * silent_s for rank, used in now.items())
        if silent_s < (IDLE_S if is_idle else BUSY_S):
            return None
        how = "none of its ranks computes" if is_idle else "its ranks only wait"
        told = f"{record.in_flight} requests run, and for {silent_s:.0f} s no token came and {how}"
        return f"{told}: a rank or the way to it hangs; all are started again."

    async def _ask(self, record: Record) -> None:
        try:
            page = await self._page_of(record.upstream) if record.upstream else None
        finally:
            self._asking.discard(record.name)
        beat = self._beats.get(record.name)
        if page is None or beat is None:
            return
        values = samples(page)
        steps = sum(values.get(name, 0.0) for name in _STEPS)
        if steps != beat.steps or not any(values.get(name) for name in _IN_HAND):
            self._beats[record.name] = self._beat(record, steps)

    def _beat(self, record: Record, steps: float | None) -> Beat:
        return Beat(steps, self._clock(), _cpu_s(record))


def _works(record: Record) -> bool:
    serving = record.state in STARTING or record.state in (ModelState.READY, ModelState.DRAINING)
    return serving and record.world > 1 and record.in_flight > 0 and record.upstream is not None


def _cpu_s(record: Record) -> dict[int, float]:
    return {fact.handle.rank: fact.cpu_s for fact in record.ranks or () if fact.handle.start == record.rank_id}
