"""Owns what a bench sees of the daemon: counters, a model's entry, files and plan; and which rates the daemon learns from its result."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from sparkd.admin.disk_routes import Disk
from sparkd.admin.running_bench import BenchedModel, Surroundings
from sparkd.admin.starts import READ, Starts
from sparkd.bench.figures import measured, read
from sparkd.bench.passages import LOOKED_UP
from sparkd.bench.result import BenchResult, Predicted, Published
from sparkd.capacity.learned_rates import LearnedName, learn
from sparkd.capacity.plan_for_node import QuestionHere, planned_here
from sparkd.capacity.requirement import runtime_of
from sparkd.cluster.cluster import Cluster
from sparkd.control.registry import Roster
from sparkd.control.supervisor import Supervisor
from sparkd.errors import BadRequest, ConfigError, UnknownModel
from sparkd.gateway.rates import Rates, Sample, sample_of
from sparkd.gateway.scraper import Scraper, page_of
from sparkd.gateway.upstream import Upstream
from sparkd.models.remote_headers import checkpoint_of as headers_of
from sparkd.models.source import folder_of
from sparkd.recipes.library import RecipeLibrary
from sparkd.schema.fields import is_name
from sparkd.schema.quantize import is_best, recipe
from sparkd.state.nouns import Want
from sparkd.state.snapshot import Snapshot
from sparkd.vllm.installed import full_version_in
from sparkd.vllm.reserved_args import loader_flags
from workers.host.disk_rate import largest, rate
from workers.kv.profiles import checkpoint_of

DRIVER = Path("/proc/driver/nvidia/version")
# The figures of a recipe that a bench measures too.
UNITS = {
    **dict.fromkeys(("decode_tokens_per_s", "total_decode_tokens_per_s", "prefill_tokens_per_s"), "tokens/s"),
    **dict.fromkeys(("ttft_s", "load_s"), "s"),
}
# A step that reads less weights, or a load that reads less, does not show the rate of the memory or of the disk.
_SHOWN_BYTES = 1 << 30
_RELEASE = re.compile(r"\s([0-9]{3,}\.[0-9.]+)\s")

Targets = Callable[[], Iterable[tuple[str, str, Upstream]]]


def surroundings(
    supervisor: Supervisor, cluster: Cluster, engines: Targets, scraper: Scraper, starts: Starts, base_url: str, key: str
) -> Surroundings:
    """engines: of the models that are loaded. base_url, key: of the daemon's own gateway."""
    registry, snapshot = supervisor.registry, supervisor.snapshot
    disk = Disk(supervisor, registry, supervisor.ledger, cluster)
    return Surroundings(
        snapshot,
        supervisor.want,
        counters=partial(counters_of, engines),
        kv_use=lambda model: scraper.rates().get(model, Rates()).kv_usage,
        model=partial(benched_model, registry),
        predict=partial(predicted, registry, cluster, snapshot),
        learn=lambda result: learn(registry.config.state_dir, rates_of(result)),
        incident=partial(incident_of, cluster),
        start_of=starts.of,
        forget=partial(forget_quantized, disk, registry),
        is_kept=partial(is_quantized_kept, disk, registry),
        disk_rate=partial(disk_rate, registry),
        check_lendable=partial(check_lendable, registry),
        lend=partial(lend, registry),
        take_back=partial(take_back, supervisor.want, registry),
        base_url=base_url,
        key=key,
    )


async def counters_of(targets: Targets, model: str) -> Sample | None:
    """The counters of a model's engine, asked now; None where it gives none."""
    upstream = next((upstream for name, _, upstream in targets() if name == model), None)
    page = await page_of(upstream) if upstream is not None else None
    return None if page is None else await asyncio.to_thread(sample_of, page, time.monotonic())


async def incident_of(cluster: Cluster, start: str) -> str | None:
    """The id of the memory guard's newest incident of a start of an engine, on any node; None where there is none.

    start: the id of its rank 0, with which those of the other ranks begin (sparkd.cluster.launcher.StartId).
    """
    by_node = await cluster.everywhere("incidents")
    rows = [(str(row["rank_id"]), str(row["id"])) for listed in by_node.values() for row in listed or ()]
    return max((incident for rank, incident in rows if rank == start or rank.startswith(f"{start}-r")), default=None)


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
    checkpoint, interpreter = folder and checkpoint_of(folder), runtime_of(spec, registry.config)
    return BenchedModel(spec.model, folder, checkpoint, entry, version, driver_of(DRIVER), published, interpreter)


def check_lendable(registry: Roster, name: str) -> None:
    """Raises UnknownModel, ConfigError, CheckpointError, and BadRequest where the model has no unquantized form. Blocks."""
    spec, engine = registry.find(name, configured=True).spec, registry.config.engine
    if spec is None:
        raise UnknownModel(name, [])
    cure = "There is no unquantized model to compare with: measure an entry of the unquantized checkpoint."
    if spec.quantize is None and (spec.quantization is not None or spec.load_format is not None or any(loader_flags(spec.extra_args))):
        raise BadRequest(f"The entry of {name} has vLLM quantize or load the weights its own way. {cure}", param="model")
    if not spec.runs_vllm(engine):
        return
    checkpoint = headers_of(spec.model, spec.revision, {**os.environ, **spec.environment(engine)})
    if checkpoint.quantization is not None:
        raise BadRequest(f"The checkpoint of {name} is stored quantized ({checkpoint.quantization.method}). {cure}", param="model")


def lend(registry: Roster, name: str, suffix: str, quantize: Any) -> str:
    """Add NAME.bench-SUFFIX, with the entry of a model and another `quantize`, and return its name. Raises Conflict, ConfigError.

    A vLLM engine's `memory_gib` of the entry is of its own format, so that of another is counted anew. Only the format of the
    entry uses the quantized cache, which the checkpoint and the format determine, so a bench leaves nothing there that the entry would not.
    """
    spec = registry.find(name, configured=True).spec
    lent = f"{name}.bench-{suffix}"
    if spec is None or not is_name(lent):
        raise ConfigError(f"{lent} cannot be a model: its name is too long, or {name} is configured no more. Give {name} a shorter name.")
    made = recipe(quantize)
    changes: dict[str, Any] = {
        "name": lent,
        "quantize": made,
        "quantized_cache": spec.quantized_cache and made == spec.quantize,
        "extra_args": (*spec.extra_args, "--max-logprobs", str(LOOKED_UP)),
        "aliases": (),
        "served_model_name": (),
        "default": False,
        "preload": False,
        "pin": False,
    }
    if spec.runs_vllm(registry.config.engine):
        changes["memory_gib"] = "auto"
    registry.lend(lent, spec.model_copy(update=changes))
    return lent


def take_back(want: Callable[[str, Want, str], object], registry: Roster, lent: str) -> None:
    """Unload and forget a lent model. An operator may have removed it already."""
    with suppress(UnknownModel):
        want(lent, Want.STOPPED, "admin")
    registry.lend(lent, None)


async def predicted(registry: Roster, cluster: Cluster, snapshot: Callable[[], Snapshot], name: str) -> Predicted | None:
    """The figures of the plan that `sparkd plan` shows first; None where nothing fits. Raises SparkdError for a model without a plan."""
    in_sight = sum(node.agent for node in snapshot().nodes)
    siting, places = cluster.siting, registry.model_places()
    spec = registry.find(name).spec
    plan = await planned_here(QuestionHere(model=name), spec, siting.unlinked, registry.config, in_sight, places, cluster.runtime)
    if plan["choice"] is None:
        return None
    figures = plan["choice"]["footprint"]
    first_load_s = figures["first_load_s"]
    return Predicted(
        decode_tokens_per_s=figures["decode_tokens_s"],
        # The weights alone: only the first load of a bench may have to calibrate.
        first_load_s=None if first_load_s is None else first_load_s - (figures["calibration_s"] or 0.0),
        next_load_s=figures["next_load_s"],
        active_bytes=figures["active_bytes"],
    )


async def forget_quantized(disk: Disk, registry: Roster, model: str) -> None:
    """Remove what is kept of a model's weights in its format, on every node. Raises Conflict while a model is loaded."""
    for entry in await _quantized(disk, registry, model):
        await disk.remove(entry["kind"], entry["id"], entry["node"])


async def is_quantized_kept(disk: Disk, registry: Roster, model: str) -> bool:
    return any(entry["valid"] for entry in await _quantized(disk, registry, model))


async def _quantized(disk: Disk, registry: Roster, model: str) -> list[dict[str, Any]]:
    """The entries of the model's checkpoint in its format, by their names `<model>-<format>-<key>`; of `auto` and `best` those in every
    format."""
    spec = registry.find(model, configured=True).spec
    recipe = spec.quantize if spec is not None and isinstance(spec.quantize, Mapping) and not is_best(spec.quantize) else {}
    name = f"{recipe['format']}-mixed" if recipe.get("layers") else recipe.get("format", "")
    ending = f"-{name}" if name else ""
    entries = (await disk.listing())["entries"]
    ours = [entry for entry in entries if entry["kind"] == "quantized" and model in entry["used_by"]]
    return [entry for entry in ours if entry["id"].rpartition("-")[0].endswith(ending)]


def disk_rate(registry: Roster, name: str) -> float | None:
    """Bytes a second of one reader of the model's largest file, past the page cache; None where no large file is here. Blocks."""
    folder = benched_model(registry, name).folder
    file = largest([Path(folder)]) if folder is not None else None
    if file is None:
        return None
    try:
        done, seconds, _ = rate(file)
    except OSError:
        return None
    return done / seconds if seconds else None


def rates_of(result: BenchResult) -> dict[LearnedName, float]:
    """The rates of this node that a result shows, bytes a second.

    bandwidth_bytes_s: at which one request at a time at the smallest depth reads the active weights, once for each token. Links of several
    nodes count too, and the tokens of a draft read nothing, so neither shows it. disk_bytes_s: the median of the loads that only read.
    Neither comes from less than _SHOWN_BYTES, because the rest of a step or a load takes most of its time then.
    """
    rates: dict[LearnedName, float] = {}
    cell = next((each for each in measured(result) if each.cell.concurrency == 1), None)
    decode = None if cell is None else read("tg", cell)
    alone = len(result.subject.nodes) == 1
    active = (result.predicted.active_bytes if result.predicted is not None else None) or 0
    if cell is not None and decode and alone and cell.engine.drafted_tokens is None and active >= _SHOWN_BYTES:
        rates["bandwidth_bytes_s"] = active * decode.mean
    reading = [
        load.bytes_per_s
        for load in result.loads
        if load.bytes_per_s and any(phase.phase == READ and (phase.bytes or 0) >= _SHOWN_BYTES for phase in load.phases)
    ]
    if alone and reading:
        rates["disk_bytes_s"] = median(reading)
    return rates


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
