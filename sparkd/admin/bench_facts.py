"""The daemon describes a model for a bench, lends a copy of it, and learns rates from the result."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from sparkd import __version__
from sparkd.bench.figures import WEIGHTS, answer_metric, measured
from sparkd.bench.passages import LOOKED_UP
from sparkd.bench.quality_bench import ENTRY, STORED, check_format
from sparkd.bench.result import BenchResult, BenchSubject, Published
from sparkd.capacity.plan_for_node import LearnedName
from sparkd.checkpoint.bounded_read import read_bounded
from sparkd.checkpoint.remote_headers import checkpoint_at
from sparkd.checkpoint.source import folder_of
from sparkd.config.fields import is_name
from sparkd.config.quantize import canonical, parse
from sparkd.control.registry import Registry
from sparkd.errors import BadRequest, ConfigError
from sparkd.recipes.library import RecipeLibrary
from sparkd.state.snapshot import Snapshot
from sparkd.vllm.installed import full_version_in
from sparkd.vllm.reserved_args import loader_flags
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


@dataclass(frozen=True, slots=True)
class Benched:
    """
    subject: the model as a result describes it.
    folder: of its files on the daemon's node; None where they are not there.
    published: figures of its recipe.
    """

    subject: BenchSubject
    folder: str | None
    published: tuple[Published, ...]


def benched(registry: Registry, snapshot: Snapshot, name: str) -> Benched:
    """Raises UnknownModel. Blocks."""
    spec, engine = registry.spec(name), registry.config.engine
    view = snapshot.models[spec.name]
    folder = folder_of(spec.model, spec.revision, {**os.environ, **spec.environment(engine)})
    nodes = {rank.node_id for rank in view.ranks} or {node.node_id for node in snapshot.nodes}
    readings = [node.reading for node in snapshot.nodes if node.reading and node.node_id in nodes]
    gpus = sorted({reading.gpu_name for reading in readings if reading.gpu_name})
    written = canonical(spec.quantize)
    subject = BenchSubject(
        model=spec.name,
        source=spec.model,
        checkpoint=folder and checkpoint_of(folder),
        entry=dict(spec.given),
        format=str(written["format"]) if isinstance(written, Mapping) else written,
        vllm=full_version_in(spec.runtime_of(engine)),
        driver=driver_of(DRIVER),
        sparkd=__version__,
        gpu=", ".join(gpus) or None,
        nodes=sorted(nodes),
    )
    return Benched(subject, folder, published_of(registry.config.book(), spec.recipe))


def check_lendable(registry: Registry, name: str) -> None:
    """Raises UnknownModel, ConfigError, CheckpointError, and BadRequest where the model has no unquantized form. Blocks."""
    spec, engine = registry.spec(name), registry.config.engine
    cure = "There is no unquantized model to compare with: measure an entry of the unquantized checkpoint."
    if spec.quantize is None and (spec.quantization is not None or spec.load_format is not None or any(loader_flags(spec.extra_args))):
        raise BadRequest(f"The entry of {name} has vLLM quantize or load the weights its own way. {cure}", param="model")
    if not spec.runs_vllm(engine):
        return
    checkpoint = read_bounded(checkpoint_at, spec.model, spec.revision, {**os.environ, **spec.environment(engine)})
    if checkpoint.quantization is not None:
        raise BadRequest(f"The checkpoint of {name} is stored quantized ({checkpoint.quantization.method}). {cure}", param="model")


def lend(registry: Registry, name: str, form: str) -> str:
    """Add NAME.bench-FORMAT with the entry of a model in another format, until it is removed or the daemon ends; return its name.

    form: a format, `as stored`, or `entry` for that of the entry.

    Raises UnknownModel, BadRequest, Conflict and ConfigError.

    A vLLM engine's `memory_gib` of the entry is of its own format, so that of another is counted anew. Only the format of the
    entry uses the quantized cache, which the checkpoint and the format determine, so a bench leaves nothing there that the entry would not.
    """
    if form != STORED:
        check_format(form)
    spec = registry.spec(name)
    lent = f"{name}.bench-{form.replace(' ', '-')}"
    if not is_name(lent):
        raise ConfigError(f"{lent} cannot be a model, because its name is too long. Give {name} a shorter name.")
    quantize = spec.quantize if form == ENTRY else parse(None if form == STORED else form)
    changes: dict[str, Any] = {
        "name": lent,
        "quantize": quantize,
        "quantized_cache": spec.quantized_cache and quantize == spec.quantize,
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


def rates_of(result: BenchResult) -> dict[LearnedName, float]:
    """The rates of this node that a result shows, bytes a second.

    bandwidth_bytes_s: at which one request at a time at the smallest depth reads the active weights, once for each token. Links of several
    nodes count too, and the tokens of a draft read nothing, so neither shows it. disk_bytes_s: the median of the loads that only read.
    Neither comes from less than _SHOWN_BYTES, because the rest of a step or a load takes most of its time then.
    """
    rates: dict[LearnedName, float] = {}
    cell = next((each for each in measured(result) if each.cell.concurrency == 1), None)
    decode = None if cell is None else answer_metric(cell, "tg_throughput")
    alone = len(result.subject.nodes) == 1
    active = (result.predicted.active_bytes if result.predicted is not None else None) or 0
    if cell is not None and decode and alone and cell.engine.drafted_tokens is None and active >= _SHOWN_BYTES:
        rates["bandwidth_bytes_s"] = active * decode.mean
    reading = [
        load.bytes_per_s
        for load in result.loads
        if load.bytes_per_s and any(phase.phase == WEIGHTS[0] and (phase.bytes or 0) >= _SHOWN_BYTES for phase in load.phases)
    ]
    if alone and reading:
        rates["disk_bytes_s"] = median(reading)
    return rates


def published_of(library: RecipeLibrary, name: str | None) -> tuple[Published, ...]:
    """The rates and times that the recipe of this name gives, with where each comes from. None of a recipe that cannot be read."""
    if name is None:
        return ()
    file, _ = library.read(name)
    if file is None:
        return ()
    return tuple(
        Published(what=each.what, value=each.value, to=each.to, unit=unit, when=each.when, source=file.recipe.sources[each.source])
        for each in file.recipe.expected
        if (unit := UNITS.get(each.what)) is not None
    )


def driver_of(path: Path) -> str | None:
    """The release of NVIDIA's driver on this node; None without one."""
    try:
        release = _RELEASE.search(path.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return None
    return release[1] if release is not None else None
