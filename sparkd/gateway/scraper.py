"""Collects every engine's metrics beforehand, with `model` and `node`, so that no scrape waits for an engine, and what they come to."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sparkd import metrics
from sparkd.errors import EngineError
from sparkd.execution.boundary import Boundary
from sparkd.gateway.rates import EngineRates, Rates, sample_of
from sparkd.gateway.upstream import Upstream

_log = logging.getLogger("sparkd.gateway.scraper")

EVERY_S = 5.0
# The interval while a client shows the page, for the rates alone.
WATCHED_EVERY_S = 1.0
TIMEOUT_S = 2.0
MAX_BYTES = 4 << 20
KEEP_S = 30.0

_OWN_LINE = re.compile(r"^(?:# (?:HELP|TYPE) )?vllm:.*", re.MULTILINE)
_OURS = ("model", "node")

Key = tuple[str, str]  # model, node


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
        self._rates: dict[Key, EngineRates] = {}
        self._boundary = boundary or Boundary(clock)
        self._targets = targets
        self._clock = clock
        self._pages: dict[Key, tuple[float, Sequence[Metric]]] = {}
        self._text = b""
        # When an engine's page came last, or when it was first asked for one.
        self._fresh_at_s: dict[Key, float] = {}
        self._unreadable: set[Key] = set()

    async def run(self) -> None:
        whole_at_s = float("-inf")
        while True:
            now_s = self._clock()
            if now_s - whole_at_s >= EVERY_S - WATCHED_EVERY_S / 2:
                whole_at_s = now_s
                await self.once()
            else:
                await self.measure()
            await asyncio.sleep(WATCHED_EVERY_S if self.watched else EVERY_S)

    async def once(self) -> None:
        """Fetch all engines side by side; a page older than KEEP_S is dropped rather than shown as if it were news."""
        targets = list(self._targets())
        fetched: dict[Key, Sequence[Metric] | None] = {(model, node): None for model, node, _ in targets}

        async def fetch(model: str, node: str, upstream: Upstream) -> None:
            page = await page_of(upstream)
            await self._take((model, node), page)
            if page is not None:
                fetched[model, node] = await self._families((model, node), page)

        async with asyncio.TaskGroup() as tasks:
            for target in targets:
                self._boundary.spawn(tasks, f"scraper {target[0]}", fetch(*target))
        now_s = self._clock()
        for gone in self._fresh_at_s.keys() - fetched.keys():
            del self._fresh_at_s[gone]
        for gone in self._rates.keys() - fetched.keys():
            del self._rates[gone]
        for key, families in fetched.items():
            self._fresh_at_s.setdefault(key, now_s)
            if families is not None:
                self._pages[key] = (now_s, families)
                self._fresh_at_s[key] = now_s
        self._pages = {key: page for key, page in self._pages.items() if key in fetched and now_s - page[0] <= KEEP_S}
        pages = [families for _, families in self._pages.values()]
        self._text = await asyncio.to_thread(merge, pages) if pages else b""

    async def measure(self) -> None:
        """Fetch all engines for their rates alone; what `text()` shows stays."""

        async def fetch(model: str, node: str, upstream: Upstream) -> None:
            await self._take((model, node), await page_of(upstream))

        async with asyncio.TaskGroup() as tasks:
            for target in self._targets():
                self._boundary.spawn(tasks, f"scraper {target[0]}", fetch(*target))

    async def _families(self, key: Key, page: str) -> Sequence[Metric] | None:
        """In a thread: a page takes the parser some 20 ms. A page that it does not read is dropped, and logged once."""
        try:
            families = await asyncio.to_thread(labelled, page, *key)
        except (ValueError, LookupError):
            if key not in self._unreadable:
                _log.warning("the metrics of %s on %s are left out: its page is not in Prometheus's text format", *key)
            self._unreadable.add(key)
            return None
        self._unreadable.discard(key)
        return families

    async def _take(self, key: Key, page: str | None) -> None:
        """An engine that gives no page has no rates: old ones would look like news."""
        if page is None:
            self._rates.pop(key, None)
        else:
            sample = await asyncio.to_thread(sample_of, page, self._clock())
            self._rates.setdefault(key, EngineRates()).take(sample)

    def rates(self) -> dict[str, Rates]:
        """By model, of the engines that answer."""
        return {model: rates.figures() for (model, _), rates in self._rates.items()}

    def text(self) -> bytes:
        """The engines' last pages, as one. Sets our own series of their age."""
        metrics.ENGINE_METRICS_AGE_SECONDS.clear()
        for key, at_s in self._fresh_at_s.items():
            metrics.ENGINE_METRICS_AGE_SECONDS.labels(*key).set(self._clock() - at_s)
        return self._text


def labelled(page: str, model: str, node: str) -> Sequence[Metric]:
    """An engine's own families, with `model` and `node` added to every sample. Raises ValueError or LookupError for other text.

    A label of that name which an engine has itself becomes `exported_model` or `exported_node`, as Prometheus would call it.
    """
    families = [*text_string_to_metric_families("\n".join(_OWN_LINE.findall(page)))]
    for family in families:
        family.samples = [
            sample._replace(labels={_exported(name): value for name, value in sample.labels.items()} | {"model": model, "node": node})
            for sample in family.samples
        ]
    return families


def merge(pages: Iterable[Sequence[Metric]]) -> bytes:
    """One exposition of many: HELP and TYPE once for each family, its samples of all engines together."""
    merged: dict[str, Metric] = {}
    for families in pages:
        for family in families:
            whole = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples.extend(family.samples)
    registry = CollectorRegistry()
    registry.register(_Merged(merged))
    return generate_latest(registry)


async def page_of(upstream: Upstream) -> str | None:
    """An engine's metrics page; None where it has none of at most MAX_BYTES to give within TIMEOUT_S."""
    try:
        page = await upstream.get("/metrics", MAX_BYTES, TIMEOUT_S)
    except (TimeoutError, EngineError):
        return None
    return page.decode("utf-8", "replace") if len(page) <= MAX_BYTES else None


class _Merged:
    """The families that `merge` has made, as a registry collects them."""

    def __init__(self, families: dict[str, Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families.values())


def _exported(label: str) -> str:
    return f"exported_{label}" if label in _OURS else label
