"""Owns a plan as data: the command line renders it and the admin API returns it. Never reads a checkpoint, never starts anything."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkd.capacity.advice import refusal
from sparkd.capacity.fit import AS_STORED, FitRequest, FitResult, Option, Rank, floor, rank, smallest
from sparkd.capacity.footprint import MeasuredPeaks
from sparkd.capacity.kv_cache import Serving
from sparkd.capacity.profiles import engine_of, peaks_of
from sparkd.capacity.weights import Inventory
from sparkd.checkpoint.header import shown
from sparkd.errors import ConfigError
from sparkd.hardware import GIB, JIT_CAPS, Hardware
from sparkd.models.source import folder_of, name_of
from sparkd.schema import kv_cache as kv_sizing
from sparkd.schema import quantize as quantizing
from sparkd.schema.engine_flags import flags_of
from sparkd.vllm.installed import full_version_in
from workers.host.runtime import API_SERVER
from workers.kv.profiles import checkpoint_of, profiles_in
from workers.quantization.recipe import QuantizationRecipe
from workers.rank.command import build_command, build_environment, media_flags, parallel_flags
from workers.rank.spec import RankSpec

if TYPE_CHECKING:
    from sparkd.capacity.consultation import Witness
    from sparkd.config.config import Config
    from sparkd.inquiry.model_answers import InquiryRuntime

# The utilizations of a floor table; the smallest that works is one more.
STEPS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 0.9)
MASTER_PORT = 29500
# The state folder of a packaged sparkd, for a plan without a configuration.
STATE_DIR = "/var/lib/sparkd"
PROFILES = "kv-profiles"
OWN = ("SPARKD_RANK_ID", "SPARKD_RUN_DIR", "VLLM_RPC_BASE_PATH", "SPT_NOENV", "PATH", "LANG")


@dataclass(frozen=True, slots=True)
class Site:
    """The settings of the machine that would start the planned model. runtime: the interpreter with vLLM, None for sparkd's own. quantized:
    the folder of quantized weights, None for none; quantized_limit: its limit in bytes, None for no limit; profiles: the folder of measured
    profiles, None for none."""

    runtime: Path | None = None
    quantized: str | None = f"{STATE_DIR}/quantized"
    quantized_limit: int | None = None
    profiles: str | None = f"{STATE_DIR}/{PROFILES}"

    @staticmethod
    def of(config: Config) -> Site:
        limit_gib = config.quantized_cache.limit_gib
        limit = None if limit_gib is None else int(limit_gib * GIB)
        return Site(config.engine.runtime, str(config.quantized_path), limit, str(config.profiles_path))

    @staticmethod
    def without_config(environ: Mapping[str, str]) -> Site:
        """The site of a user without a sparkd.yaml: the folders of `sparkd serve`, or none where that user could not make them."""
        folder = environ.get("SPARKD_STATE_DIR") or STATE_DIR
        if folder == STATE_DIR and not os.path.isdir(folder) and not os.access(os.path.dirname(folder), os.W_OK):
            return Site(quantized=None, profiles=None)
        folder = os.path.abspath(folder)
        return Site(quantized=f"{folder}/quantized", profiles=f"{folder}/{PROFILES}")


@dataclass(frozen=True, slots=True)
class _Entry:
    """The keys that `entry_of` sets; every other key has the configuration's default."""

    name: str
    model: str
    quantize: dict[str, Any] | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache: dict[str, Any] | None = None
    kv_margin_gib: float | None = None
    kv_cache_dtype: str | None = None
    enforce_eager: bool = False
    quantized_cache: bool = True
    allow_missing_weights: bool = False
    quantization: str | None = None
    load_format: str | None = None
    gpu_memory_utilization: float | None = None
    tool_call_parser: str | None = None
    sampling: None = None
    trust_remote_code: bool = False
    extra_args: tuple[str, ...] = ()


def vllm_json(runtime: InquiryRuntime, witness: Witness) -> dict[str, Any]:
    """The vLLM that a plan may rely on. version: null where the runtime has no vLLM; answered: whether it answered a question."""
    return {"runtime": runtime.place, "version": runtime.version, "answered": witness.answered}


@dataclass(frozen=True, slots=True)
class Offer:
    """A quantized checkpoint of the same model on this machine. model: folder or hub id."""

    model: str
    inventory: Inventory
    choice: FitResult

    @property
    def method(self) -> str:
        source = self.inventory.checkpoint.quantization
        return source.method if source is not None else AS_STORED


def to_json(
    model: str,
    inventory: Inventory,
    hardware: Hardware,
    wish: FitRequest,
    choice: FitResult,
    offers: Sequence[Offer] = (),
    how: Mapping[str, Any] | None = None,
    site: Site | None = None,
) -> dict[str, Any]:
    """The plan as plain JSON: bytes as integers, seconds and tokens/s as floats, null for unknown values. Each option names its model.
    how: the start of the best option for a configured model; else how_of computes it from site."""
    checkpoint, shape = inventory.checkpoint, inventory.shape
    ways: list[tuple[Rank, str, Option, str | None]] = [(rank(one, inventory, wish), model, one, None) for one in choice.options]
    ways += [
        (rank(one, each.inventory, wish, prequantized=True), each.model, one, each.method) for each in offers for one in each.choice.options
    ]
    ways.sort(key=lambda way: way[0])
    _, of, best, already = ways[0] if ways and ways[0][2].fits else (None, model, None, None)
    refused = refusal([option for *_, option, _ in ways], inventory, wish)
    return {
        "model": model,
        "entry": None,
        "folder": checkpoint.folder,
        "architecture": shape.architecture,
        "layers": shape.layers,
        "max_len": shape.max_len,
        "bytes": inventory.stored_bytes,
        "unloaded": dict(inventory.unloaded),
        "unknown_experts": inventory.unknown_experts() if any(option.format != AS_STORED for option in choice.options) else {},
        "quantization": checkpoint.quantization.method if checkpoint.quantization else None,
        "hardware": asdict(hardware),
        "asked": {
            "nodes": wish.nodes,
            "requests": wish.requests,
            "max_model_len": wish.max_model_len,
            "eager": wish.eager,
            "speculative": wish.drafting.method if wish.drafting is not None else None,
        },
        "options": [{**option_json(one), "model": name, "prequantized": method} for _, name, one, method in ways],
        "choice": None
        if best is None
        else {**option_json(best), "model": of, "prequantized": already, **(how or how_of(of, best, wish, hardware, site or Site()))},
        "refusal": None if refused is None else refused.to_json(),
        "floor": [] if best is None else _floor(best, hardware),
        "notes": [*choice.notes, *(_offered(each, model, of) for each in offers)],
    }


def _offered(offer: Offer, model: str, chosen: str) -> str:
    how = f"{offer.model} is on this machine: the same model, quantized already ({offer.method})"
    if offer.model == chosen:
        return f"{how}. sparkd serves it rather than quantize {model} here."
    return f"{how}; name it in `model:` to have it served."


def option_json(option: Option) -> dict[str, Any]:
    """An option as JSON. footprint: null where vLLM cannot split the model that way."""
    found = option.footprint
    told: dict[str, Any] = {
        "format": option.format,
        "nodes": option.nodes,
        "tensor_parallel": option.tensor,
        "pipeline_parallel": option.pipeline,
        "fits": option.fits,
        "reason": option.reason,
        "max_model_len": option.serving.max_model_len,
        "longest": option.longest,
        "footprint": None,
    }
    if found is not None:
        told["footprint"] = {
            **found.parts,
            "system": found.system_bytes,
            "margin": found.margin_bytes,
            "free": found.free_bytes,
            "withheld": found.withheld_bytes,
            "memory": found.memory_bytes,
            "total": found.total,
            "sureness": found.sureness,
            "upper": found.upper_bytes,
            "upper_kv": found.upper_cache_bytes,
            "requests": found.requests,
            "kv_bytes_per_token": found.kv.per_token,
            "kv_bytes_per_request": found.kv.per_request,
            "load_peak": found.load_peak_bytes,
            "disk": found.weights.disk_bytes if found.weights.changed else 0,
            "by_class": dict(found.weights.by_kind),
            "first_load_s": found.first_load_s,
            "next_load_s": found.next_load_s,
            "calibration_s": None if found.calibration is None else found.calibration.seconds,
            "calibration_free": 0 if found.calibration is None else found.calibration.free_bytes,
            "decode_tokens_s": found.decode_tokens_s,
            "active_bytes": found.weights.active_bytes,
            "notes": list(found.weights.notes),
        }
    return told


def how_of(model: str, option: Option, wish: FitRequest, hardware: Hardware, site: Site) -> dict[str, Any]:
    """The start of an option. config: the model's entry for sparkd.yaml, null for pipeline stages of several ranks, which no entry can
    express; ranks: vLLM's command on each node and the environment that sparkd adds. Raises ConfigError for a model that the configuration
    would refuse."""
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in model):
        raise ConfigError(f"{shown(model)}: a model's name or path has no control characters; rename it.", param="model")
    entry = entry_of(model, option, wish)
    spec = _spec_of(model, entry, wish)
    env = wish.drafting.env if wish.drafting is not None else {}
    ranks = [_rank(spec, option, number, hardware, env, site) for number in range(option.nodes)]
    return {"name": spec.name, "config": None if min(option.tensor, option.pipeline) > 1 else entry, "ranks": ranks}


def learned_with(
    model: str, wish: FitRequest, site: Site, hardware: Hardware
) -> Callable[[QuantizationRecipe, Serving], MeasuredPeaks | None]:
    """A function that finds the peaks measured by earlier starts of the same engine on this machine."""
    env, vllm = wish.drafting.env if wish.drafting is not None else {}, full_version_in(site.runtime)
    profiles, held = profiles_in(site.profiles or ""), folder_of(model, None, env)
    checkpoint = None if held is None else checkpoint_of(held)

    def learned(recipe: QuantizationRecipe, serving: Serving) -> MeasuredPeaks | None:
        spelling = recipe.canonical() if recipe.quantizes else None
        ways = serving.tensor_parallel, serving.pipeline_parallel
        option = Option(AS_STORED if spelling is None else recipe.default.spelling, *ways, serving, None, None)
        spec = replace(_spec_of(model, entry_of(model, option, wish), wish), quantize=spelling)
        return peaks_of(profiles, engine_of(flags_of(spec), spelling, env, vllm, hardware.platform), checkpoint, ways, hardware.name)

    return learned


def entry_of(model: str, option: Option, wish: FitRequest) -> dict[str, Any]:
    """The entry of an option. It contains the plan's numbers even where vLLM has a default, which depends on its release and the device."""
    entry: dict[str, Any] = {"model": model}
    if option.format != AS_STORED:
        entry["quantize"] = wish.quantize.canonical() if wish.quantize is not None and wish.quantize.rules else option.format
    for key in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        entry[key] = getattr(option.serving, key)
    if option.tensor > 1:
        entry["tensor_parallel"] = option.tensor
    if wish.counted or wish.requests > 1:
        entry["kv_cache"] = {"sequences": wish.requests}
    if wish.margin_bytes is not None:
        entry["kv_margin_gib"] = wish.margin_bytes / GIB
    if wish.eager:
        entry["enforce_eager"] = True
    if option.serving.kv_dtype != "auto" and not (wish.drafting is not None and "kv_cache_dtype" in wish.drafting.settings):
        entry["kv_cache_dtype"] = option.serving.kv_dtype
    if wish.drafting is not None:
        recipe = wish.drafting.recipe
        entry |= {"extra_args": list(wish.drafting.args)} if recipe is None else {"recipe": recipe}
    return entry


def _spec_of(model: str, entry: Mapping[str, Any], wish: FitRequest) -> _Entry:
    read = {**entry, "quantize": QuantizationRecipe.parse(entry["quantize"]).canonical()} if "quantize" in entry else entry
    fields = {key: value for key, value in read.items() if key not in ("tensor_parallel", "extra_args", "recipe")}
    if wish.drafting is not None:
        own = {key: value for key, value in wish.drafting.settings.items() if key in _Entry.__dataclass_fields__}
        fields = {**own, **fields, "extra_args": wish.drafting.args}
    return _Entry(name_of(model), **fields)


def _rank(spec: _Entry, option: Option, number: int, hardware: Hardware, env: Mapping[str, str], site: Site) -> dict[str, Any]:
    flags = [*(["--enforce-eager"] if hardware.platform == "cpu" else []), *media_flags()]
    flags += parallel_flags(option.tensor, option.pipeline, number, "HEAD", MASTER_PORT)
    fields: dict[str, Any] = {
        "model_name": spec.name,
        "served_names": [spec.name],
        "model": spec.model,
        "runtime": sys.executable if site.runtime is None else str(site.runtime),
        "entrypoint": API_SERVER,
        "platform": hardware.platform,
        "flags": flags,
        "extra_args": flags_of(spec),
        **quantizing.loader_of(spec, site.quantized, site.quantized_limit),
        **kv_sizing.sizing_of(spec, hardware.platform, API_SERVER, {}, site.profiles, None),
    }
    rank = rank_at(number, option.nodes, fields)
    environment = {**network(hardware, option.nodes, env), **build_environment(rank, {}), **env}
    return {
        "node": number,
        "command": build_command(rank),
        "environment": {name: value for name, value in environment.items() if name not in OWN},
    }


def rank_at(number: int, nodes: int, fields: Mapping[str, Any]) -> RankSpec:
    """The RankSpec of a start, on a placeholder node. fields: those of sparkd.capacity.launch_spec."""
    own = {"rank_id": "plan", "generation": 0, "node_id": "node", "run_dir": "/run/sparkd", "log_path": "/dev/null", "config_hash": ""}
    return RankSpec.from_dict({**fields, **own, "rank": number, "world": nodes})


def network(hardware: Hardware, nodes: int, configured: Mapping[str, str]) -> dict[str, str]:
    """The variables of sparkd.fabric.environment for each rank, as far as they are known without the nodes' interfaces."""
    found = dict(JIT_CAPS) if hardware.unified else {}
    if nodes > 1:
        # Imported here, because most plans are for one node and must be fast.
        from sparkd.fabric.environment import expected, wants_rdma

        found |= expected(rdma=wants_rdma(hardware.platform, configured))
    return found


def _floor(option: Option, hardware: Hardware) -> list[dict[str, Any]]:
    least = smallest(option, hardware)
    steps = sorted({*STEPS, *([] if least is None else [least])})
    need = option.footprint.kv.least if option.footprint is not None else 0
    return [
        {"utilization": share, "allowed": allowed, "kv": left, "works": left >= need, "smallest": share == least}
        for share, allowed, left in floor(option, hardware, steps)
    ]
