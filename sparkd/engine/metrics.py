"""Collects every engine's metrics beforehand, with `model` and `node`, so that no scrape waits for an engine, and what they come to."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterable

from sparkd import metrics
from sparkd.engine.rates import EngineRates, Rates, sample_of
from sparkd.engine.upstream import Upstream
from sparkd.errors import EngineError
from sparkd.execution.boundary import Boundary

EVERY_S = 5.0
# The interval while a client shows the page, for the rates alone.
WATCHED_EVERY_S = 1.0
TIMEOUT_S = 2.0
MAX_BYTES = 4 << 20
KEEP_S = 30.0

_ENGINES_OWN = ("vllm:",)
# Prometheus text format 0.0.4. Anything else is left out: one line that Prometheus cannot read costs the whole scrape, ours included.
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\.)*"'
_NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+|Inf|NaN)"
_SAMPLE = re.compile(
    rf"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{{(?P<labels>(?:{_LABEL}(?:,{_LABEL})*)?),?\}})?"
    rf"[ \t]+(?P<rest>{_NUMBER}(?:[ \t]+-?[0-9]+)?)[ \t]*"
)
_HEAD = re.compile(r"# (?:(HELP) ([a-zA-Z0-9_:]+)(?: .*)?|(TYPE) ([a-zA-Z0-9_:]+) (?:counter|gauge|histogram|summary|untyped))")
# The endings that a sample's name may have behind its family's.
_SUFFIXES = ("", "_bucket", "_sum", "_count", "_total", "_created", "_info")
# No value can hold a quote that is not escaped, so this finds names only.
_LABEL_NAME = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="(?:[^"\\\n]|\\.)*"')
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_OURS = re.compile(r'(^|,)(model|node)="')


class Scraper:
    """`targets()` gives (model, node, upstream) of the engines that are up; `text()` is what to append to our own exposition, `rates()`
    what each model does now. watched: whether the rates are looked at each second."""

    def __init__(
        self,
        targets: Callable[[], Iterable[tuple[str, str, Upstream]]],
        clock: Callable[[], float],
        boundary: Boundary | None = None,
    ) -> None:
        self.watched = False
        self._rates: dict[tuple[str, str], EngineRates] = {}
        self._boundary = boundary or Boundary(clock)
        self._targets = targets
        self._clock = clock
        self._pages: dict[tuple[str, str], tuple[float, str]] = {}
        self._text = b""
        # By (model, node): when its page came last, or when it was first asked for one.
        self._fresh_at_s: dict[tuple[str, str], float] = {}

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
        fetched: dict[tuple[str, str], str | None] = {(model, node): None for model, node, _ in targets}

        async def fetch(model: str, node: str, upstream: Upstream) -> None:
            page = fetched[model, node] = await _sound_page(upstream, model)
            await self._take((model, node), page)

        async with asyncio.TaskGroup() as tasks:
            for target in targets:
                self._boundary.spawn(tasks, f"scraper {target[0]}", fetch(*target))
        now_s = self._clock()
        for gone in self._fresh_at_s.keys() - fetched.keys():
            del self._fresh_at_s[gone]
        for gone in self._rates.keys() - fetched.keys():
            del self._rates[gone]
        for key, page in fetched.items():
            self._fresh_at_s.setdefault(key, now_s)
            if page is not None:
                self._pages[key] = (now_s, page)
                self._fresh_at_s[key] = now_s
        self._pages = {key: (at_s, page) for key, (at_s, page) in self._pages.items() if key in fetched and now_s - at_s <= KEEP_S}
        pages = {key: page for key, (_, page) in self._pages.items()}
        # Merging takes milliseconds for an engine's page: in a thread, so that it delays no stream.
        self._text = (await asyncio.to_thread(merge, pages)).encode() if pages else b""

    async def measure(self) -> None:
        """Fetch all engines for their rates alone; what `text()` shows stays."""

        async def fetch(model: str, node: str, upstream: Upstream) -> None:
            await self._take((model, node), await page_of(upstream))

        async with asyncio.TaskGroup() as tasks:
            for target in self._targets():
                self._boundary.spawn(tasks, f"scraper {target[0]}", fetch(*target))

    async def _take(self, key: tuple[str, str], page: str | None) -> None:
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


def merge(pages: dict[tuple[str, str], str]) -> str:
    """One exposition of many: `model` and `node` added to every `vllm:` sample, HELP and TYPE once for each family, families together.

    A label of that name which an engine has itself becomes `exported_model` or `exported_node`, as Prometheus would call it.
    """
    heads: dict[str, dict[str, str]] = {}
    samples: dict[str, list[str]] = {}
    for (model, node), page in pages.items():
        own = f'model="{_escape(model)}",node="{_escape(node)}"'
        family = ""
        for line in page.split("\n"):
            if line.startswith("#"):
                head = _HEAD.fullmatch(line)
                if head is not None:
                    family = head[2] or head[4]
                    heads.setdefault(family, {}).setdefault(head[1] or head[3], line)
                continue
            match = _SAMPLE.fullmatch(line) if line.startswith(_ENGINES_OWN) else None
            if match is None:
                continue
            name, labels = match["name"], _OURS.sub(r'\1exported_\2="', match["labels"] or "")
            home = _home(name, family)
            samples.setdefault(home, []).append(f"{name}{{{own}{',' if labels else ''}{labels}}} {match['rest']}")
    lines: list[str] = []
    for family, family_lines in samples.items():
        lines += [*heads.get(family, {}).values(), *family_lines]
    return "\n".join(lines) + "\n" if lines else ""


def fault_of(page: str) -> str | None:
    """Why a page is left out: for one line that Prometheus does not take it throws away the whole scrape, every other engine included.

    control: a control character. line: no sample. label: one name twice. number: beyond what 64 bits hold. series: one twice.
    family: one in two places, or typed twice.
    """
    if _CONTROL.search(page):
        return "control"
    family, typed, families, series = "", set(), set(), set()
    last = ""
    for line in page.split("\n"):
        if line.startswith("#"):
            head = _HEAD.fullmatch(line)
            if head is not None:
                family = head[2] or head[4]
                if head[4] and head[4] in typed and family.startswith(_ENGINES_OWN):
                    return "family"
                typed.add(head[4])
            continue
        if not line.startswith(_ENGINES_OWN):
            continue
        match = _SAMPLE.fullmatch(line)
        if match is None:
            return "line"
        labels = _OURS.sub(r'\1exported_\2="', match["labels"] or "")
        names = ["model", "node", *_LABEL_NAME.findall(labels)]
        if len(set(names)) < len(names):
            return "label"
        if not _fits(*match["rest"].split()):
            return "number"
        home = _home(match["name"], family)
        if home != last and home in families:
            return "family"
        last = home
        families.add(home)
        if (match["name"], labels) in series:
            return "series"
        series.add((match["name"], labels))
    return None


def samples(page: str) -> dict[str, float]:
    """The engine's own values by name, added up over their labels."""
    values: dict[str, float] = {}
    for line in page.split("\n"):
        match = _SAMPLE.fullmatch(line) if line.startswith(_ENGINES_OWN) else None
        if match is not None:
            values[match["name"]] = values.get(match["name"], 0.0) + float(match["rest"].split()[0])
    return values


async def page_of(upstream: Upstream) -> str | None:
    """An engine's metrics page; None where it has none to give within TIMEOUT_S."""
    page = await _fetched(upstream)
    return page if page is not None and len(page) <= MAX_BYTES else None


async def _sound_page(upstream: Upstream, model: str) -> str | None:
    """The engine's metrics page. A page that would spoil the scrape is left out (None) and counted."""
    page = await _fetched(upstream)
    if page is None:
        return None
    fault = "size" if len(page) > MAX_BYTES else await asyncio.to_thread(fault_of, page)
    if fault is not None:
        metrics.ENGINE_METRICS_LEFT_OUT.labels(model, fault).inc()
        return None
    return page


async def _fetched(upstream: Upstream) -> str | None:
    """A page, or what came of it when it had more than MAX_BYTES."""
    try:
        page = await upstream.get("/metrics", MAX_BYTES, TIMEOUT_S)
    except (TimeoutError, EngineError):
        return None
    return page.decode("latin-1" if len(page) > MAX_BYTES else "utf-8", "replace")


def _home(name: str, family: str) -> str:
    """The family of a sample that stands behind the head of `family`."""
    return family if name.startswith(family) and name.removeprefix(family) in _SUFFIXES else name


def _fits(value: str, timestamp: str = "0") -> bool:
    return (math.isfinite(float(value)) or value.lstrip("+-") in ("Inf", "NaN")) and abs(int(timestamp[:25])) < 1 << 63


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
