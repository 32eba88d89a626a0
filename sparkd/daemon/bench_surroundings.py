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
from sparkd.control.registry import Roster
from sparkd.engine.metrics import page_of
from sparkd.engine.rates import Sample, sample_of
from sparkd.engine.upstream import Upstream
from sparkd.models.source import folder_of
from sparkd.vllm.installed import full_version_in
from workers.kv.profiles import checkpoint_of

DRIVER = Path("/proc/driver/nvidia/version")
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
    return BenchedModel(spec.model, folder, folder and checkpoint_of(folder), entry, version, driver_of(DRIVER))


def driver_of(path: Path) -> str | None:
    """The release of NVIDIA's driver on this node; None without one."""
    try:
        release = _RELEASE.search(path.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return None
    return release[1] if release is not None else None
