"""Owns what a bench sees of the daemon: an engine's counters, a model's entry and files, the versions."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sparkd.admin.benches import BenchedModel
from sparkd.bench.result import Published
from sparkd.control.registry import Roster
from sparkd.engine.metrics import page_of
from sparkd.engine.rates import Sample, sample_of
from sparkd.engine.upstream import Upstream
from sparkd.models.source import folder_of
from sparkd.recipes.library import RecipeLibrary
from sparkd.vllm.installed import full_version_in
from workers.kv.profiles import checkpoint_of

DRIVER = Path("/proc/driver/nvidia/version")
# The figures of a recipe that a bench measures too.
UNITS = {
    **dict.fromkeys(("decode_tokens_per_s", "total_decode_tokens_per_s", "prefill_tokens_per_s"), "tokens/s"),
    **dict.fromkeys(("ttft_s", "load_s"), "s"),
}
_RELEASE = re.compile(r"\s([0-9]{3,}\.[0-9.]+)\s")

Targets = Callable[[], Iterable[tuple[str, str, Upstream]]]


async def counters_of(targets: Targets, model: str) -> Sample | None:
    """The counters of a model's engine, asked now; None where it gives none."""
    upstream = next((upstream for name, _, upstream in targets() if name == model), None)
    page = await page_of(upstream) if upstream is not None else None
    return None if page is None else await asyncio.to_thread(sample_of, page, time.monotonic())


def benched_model(registry: Roster, name: str) -> BenchedModel:
    """Raises UnknownModel."""
    record = registry.find(name, configured=True)
    spec, engine = record.spec, registry.config.engine
    if spec is None:
        return BenchedModel(name)
    folder = folder_of(spec.model, spec.revision, {**os.environ, **spec.environment(engine)})
    entry: dict[str, Any] = dict(spec.given)
    version = full_version_in(spec.runtime_of(engine))
    published = published_of(registry.config.book(), spec.recipe)
    return BenchedModel(spec.model, folder, folder and checkpoint_of(folder), entry, version, driver_of(DRIVER), published)


def published_of(library: RecipeLibrary, name: str | None) -> tuple[Published, ...]:
    """The rates and times that the recipe of this name gives, with where each comes from. None of a recipe that cannot be read."""
    if name is None:
        return ()
    base, variant = library.split(name)
    file, _ = library.read(base)
    if file is None:
        return ()
    chosen = file.recipe.variants.get(variant) if variant is not None else None
    figures = [*(chosen.expected if chosen is not None else ()), *file.recipe.expected]
    return tuple(
        Published(what=each.what, value=each.value, to=each.to, unit=unit, when=each.when, source=file.recipe.sources[each.source])
        for each in figures
        if (unit := UNITS.get(each.what)) is not None
    )


def driver_of(path: Path) -> str | None:
    """The release of NVIDIA's driver on this node; None without one."""
    try:
        release = _RELEASE.search(path.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return None
    return release[1] if release is not None else None
