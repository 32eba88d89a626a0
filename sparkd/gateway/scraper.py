"""Collects every engine's metrics beforehand, with labels `model` and `node`, so that no scrape waits for an engine."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from sparkd import metrics
from sparkd.errors import EngineError
from sparkd.execution.boundary import Boundary
from sparkd.gateway.rates import EngineRates, Rates, sample_of
from sparkd.gateway.upstream import Upstream

EVERY_S = 5.0
# The interval while a client shows the page, for the rates alone.
WATCHED_EVERY_S = 1.0
TIMEOUT_S = 2.0
KEEP_S = 30.0

_OWN_LINE = re.compile(r"^(?:# (?:HELP|TYPE) )?vllm:.*", re.MULTILINE)

Key = tuple[str, str]  # model, node


@dataclass(slots=True)
class _Engine:
    """The last pages of one engine.

    fresh_at_s: when its page came last, or when it was first asked for one.
    families: of its last page.
    rates: None while it gives no page, because old ones would look like news.
    """

    fresh_at_s: float
    families: Sequence[Metric] = ()
    rates: EngineRates | None = None


class Scraper:
    """Fetches the engines' pages while `run` runs. `text` and `rates` answer at once, from the last pages.

    targets: gives (model, node, upstream) of the engines that are up.
    clock: monotonic seconds.
    watched: whether the rates are looked at each second.
    """

    def __init__(
        self,
        targets: Callable[[], Iterable[tuple[str, str, Upstream]]],
        clock: Callable[[], float],
        boundary: Boundary | None = None,
    ) -> None:
        self.watched = False
        self._boundary = boundary or Boundary(clock)
        self._targets = targets
        self._clock = clock
        self._engines: dict[Key, _Engine] = {}
        self._text = b""

    async def run(self) -> None:
        whole_at_s = float("-inf")
        while True:
            now_s = self._clock()
            whole = now_s - whole_at_s >= EVERY_S - WATCHED_EVERY_S / 2
            whole_at_s = now_s if whole else whole_at_s
            await self.once(whole=whole)
            await asyncio.sleep(WATCHED_EVERY_S if self.watched else EVERY_S)

    async def once(self, *, whole: bool = True) -> None:
        """Fetch all engines side by side, for their rates and, if `whole`, for what `text` shows.

        A page older than KEEP_S is dropped rather than shown as if it were news.
        """
        targets = {(model, node): upstream for model, node, upstream in self._targets()}
        for gone in self._engines.keys() - targets.keys():
            del self._engines[gone]
        async with asyncio.TaskGroup() as tasks:
            for key, upstream in targets.items():
                self._boundary.spawn(tasks, f"scraper {key[0]}", self._fetch(key, upstream, whole))
        if whole:
            now_s = self._clock()
            pages = [engine.families for engine in self._engines.values() if engine.families and now_s - engine.fresh_at_s <= KEEP_S]
            self._text = await asyncio.to_thread(merge, pages) if pages else b""

    async def _fetch(self, key: Key, upstream: Upstream, whole: bool) -> None:
        engine = self._engines.setdefault(key, _Engine(self._clock()))
        page = await page_of(upstream)
        if page is None:
            engine.rates = None
            return
        engine.rates = engine.rates or EngineRates()
        engine.rates.take(await asyncio.to_thread(sample_of, page, self._clock()))
        if whole:
            # In a thread: a page takes the parser some 20 ms.
            engine.families = await asyncio.to_thread(labelled, page, *key)
            engine.fresh_at_s = self._clock()

    def rates(self) -> dict[str, Rates]:
        """By model, of the engines that answer."""
        return {model: engine.rates.figures() for (model, _), engine in self._engines.items() if engine.rates is not None}

    def text(self) -> bytes:
        """The engines' last pages, as one. Sets our own series of their age."""
        metrics.ENGINE_METRICS_AGE_SECONDS.clear()
        for key, engine in self._engines.items():
            metrics.ENGINE_METRICS_AGE_SECONDS.labels(*key).set(self._clock() - engine.fresh_at_s)
        return self._text


def labelled(page: str, model: str, node: str) -> Sequence[Metric]:
    """An engine's own families, with `model` and `node` added to every sample."""
    families = [*text_string_to_metric_families("\n".join(_OWN_LINE.findall(page)))]
    for family in families:
        family.samples = [sample._replace(labels={**sample.labels, "model": model, "node": node}) for sample in family.samples]
    return families


def merge(pages: Iterable[Sequence[Metric]]) -> bytes:
    """One exposition of many: HELP and TYPE once for each family, its samples of all engines together."""
    merged: dict[str, Metric] = {}
    for families in pages:
        for family in families:
            whole = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples.extend(family.samples)
    return generate_latest(_Merged(merged))


async def page_of(upstream: Upstream) -> str | None:
    """An engine's metrics page; None where it has none to give within TIMEOUT_S."""
    try:
        return (await upstream.get("/metrics", TIMEOUT_S)).decode()
    except EngineError:
        return None


class _Merged(Collector):
    """The families that `merge` has made, as prometheus_client collects them."""

    def __init__(self, families: dict[str, Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families.values())
