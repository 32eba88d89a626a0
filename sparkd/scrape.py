"""Collects every engine's metrics beforehand, with `model` and `node`, so that no scrape waits for an engine. Never keeps history."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable

import aiohttp

from sparkd.upstream import Upstream

EVERY_S = 5.0
TIMEOUT_S = 2.0
MAX_BYTES = 4 << 20
KEEP_S = 30.0

# `name{labels} value` or `name value`; names with a colon are vLLM's (Prometheus text format 0.0.4).
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?(?P<rest>\s.+)$")
_ENGINES_OWN = ("vllm:",)


class Scraper:
    """`targets()` gives (model, node, upstream) of the engines that are up; `text()` is what to append to our own exposition."""

    def __init__(self, targets: Callable[[], Iterable[tuple[str, str, Upstream]]], clock: Callable[[], float]) -> None:
        self._targets = targets
        self._clock = clock
        self._pages: dict[tuple[str, str], tuple[float, str]] = {}
        self._text = b""

    async def run(self) -> None:
        while True:
            await self.once()
            await asyncio.sleep(EVERY_S)

    async def once(self) -> None:
        """Fetch all engines side by side; a page older than KEEP_S is dropped rather than shown as if it were news."""
        targets = list(self._targets())
        async with asyncio.TaskGroup() as tasks:
            fetches = {(model, node): tasks.create_task(_fetch(upstream)) for model, node, upstream in targets}
        now_s = self._clock()
        for key, fetch in fetches.items():
            page = fetch.result()
            if page is not None:
                self._pages[key] = (now_s, page)
        self._pages = {key: (at_s, page) for key, (at_s, page) in self._pages.items() if key in fetches and now_s - at_s <= KEEP_S}
        self._text = merge({key: page for key, (_, page) in self._pages.items()}).encode()

    def text(self) -> bytes:
        return self._text


def merge(pages: dict[tuple[str, str], str]) -> str:
    """One exposition of many: `model` and `node` added to every `vllm:` sample, HELP and TYPE once for each family, families together."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for (model, node), page in pages.items():
        own = f'model="{_escape(model)}",node="{_escape(node)}"'
        family = ""
        for line in page.splitlines():
            if line.startswith("#"):
                words = line.split(None, 3)
                if len(words) < 3 or words[1] not in ("HELP", "TYPE"):
                    continue
                family = words[2]
                if family.startswith(_ENGINES_OWN) and line not in heads.setdefault(family, []) and len(heads[family]) < 2:
                    heads[family].append(line)
                continue
            match = _SAMPLE.match(line)
            if match is None or not match["name"].startswith(_ENGINES_OWN):
                continue
            home = family if family and match["name"].startswith(family) else match["name"]
            labels = ",".join(filter(None, (own, match["labels"])))
            samples.setdefault(home, []).append(f"{match['name']}{{{labels}}}{match['rest']}")
    lines: list[str] = []
    for family, found in samples.items():
        lines += heads.get(family, []) + found
    return "\n".join(lines) + "\n" if lines else ""


async def _fetch(upstream: Upstream) -> str | None:
    try:
        async with asyncio.timeout(TIMEOUT_S), upstream.session().get("/metrics") as response:
            if response.status != 200:
                return None
            pieces = bytearray()
            async for chunk in response.content.iter_any():
                pieces += chunk
                if len(pieces) > MAX_BYTES:
                    return None
            return pieces.decode("utf-8", "replace")
    except (TimeoutError, OSError, aiohttp.ClientError):
        return None


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
