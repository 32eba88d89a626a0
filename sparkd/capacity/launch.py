"""The start of every rank of a model: its fields, and how a plan shows them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sparkd.capacity.evidence import FAMILIES, engine_of
from sparkd.capacity.fit import Option
from sparkd.capacity.placed_entry import refused_flags, runtime_of
from sparkd.capacity.planned_entry import PlannedEntry
from sparkd.config import kv_cache, quantize
from sparkd.config.config import Config, ModelConfig
from sparkd.config.kv_cache import without_cpu_space
from sparkd.config.parser_choice import with_parsers
from sparkd.config.quantize import AUTO, is_open
from sparkd.config.trusted_commits import commits_of, pinned
from sparkd.errors import ConfigError, LoadRefused
from sparkd.fabric.environment import expected, wants_rdma
from sparkd.hardware import JIT_CAPS, Hardware
from sparkd.units import GIB
from sparkd.vllm.parsers import OFF
from workers.quantization.recipe import QuantizationRecipe
from workers.rank.command import build_command, build_environment, media_flags, parallel_flags
from workers.rank.spec import RankSpec

# The gateway keeps an access log, and a scrape every five seconds would fill the engine's.
QUIET = ("--disable-uvicorn-access-log",)
MASTER_PORT = 29500
# Variables of one start, which a plan does not show.
OWN = ("SPARKD_RANK_ID", "SPARKD_RUN_DIR", "VLLM_RPC_BASE_PATH", "SPT_NOENV", "PATH", "LANG")
_SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)


def rank_fields(config: Config, spec: ModelConfig, platform: str, entrypoint: str, vllm: str | None) -> dict[str, Any]:
    """The fields of workers.rank.spec.RankSpec that every start of the entry has. `env` is what sparkd sets, and the entry's own variables
    override it. Reads the checkpoint's headers.

    spec: without `auto`.
    vllm: its vLLM's version, None where it is not known.
    """
    reserved_bytes = int(spec.memory_gib * GIB) if isinstance(spec.memory_gib, int | float) else None
    limit_gib = config.quantized_cache.limit_gib
    fields: dict[str, Any] = {
        "model_name": spec.name,
        "served_names": list(spec.served_names()),
        "model": spec.model,
        "runtime": runtime_of(spec, config),
        "entrypoint": entrypoint,
        "platform": platform,
        # torch.compile on a CPU takes minutes and gains little; `--no-enforce-eager` in extra_args comes later and wins.
        "flags": [*(["--enforce-eager"] if platform == "cpu" else []), *QUIET, *media_flags(spec.media.domains)],
        "env": {},
        "extra_args": spec.vllm_flags(),
        **quantize.loader_of(spec, str(config.quantized_path), None if limit_gib is None else int(limit_gib * GIB)),
        **kv_cache.sizing_of(spec, platform, entrypoint, spec.environment(config.engine), str(config.profiles_path), reserved_bytes),
    }
    if (commits := commits_of(spec)) is not None:
        fields["trusted_code"] = commits.to_dict()
    if "kv_cache" in fields:
        # By this name the next plan and the next start find what this one measures.
        engine = engine_of(spec.vllm_flags(), quantize.canonical(spec.quantize), spec.environment(config.engine), vllm, platform)
        fields["kv_cache"] = {**fields["kv_cache"], "engine": engine}
    return fields


def start_of(entry: PlannedEntry, option: Option, spec: ModelConfig, hardware: Hardware) -> dict[str, Any]:
    """The start of an option, as JSON.

    spec: the entry without `auto`.
    config: in the answer, the keys that were `auto` with their values; of an entry that was made for the plan, all of its keys.

    Raises ConfigError where the runtime's vLLM would refuse the flags.
    """
    try:
        spec = pinned(spec, entry.config)
    except LoadRefused as error:
        raise ConfigError(error.message, param="model") from None
    if spec.runs_vllm(entry.config.engine):
        spec, _ = with_parsers(spec, entry.env)
    if refused := refused_flags(spec, entry.config, entry.vllm):
        raise ConfigError(f"{spec.name} cannot be started by the vLLM of its runtime: {refused[0]}", param="model")
    decided = _decided(entry.spec, spec, option)
    return {
        "name": spec.name,
        "configured": entry.added is None,
        "config": decided if entry.added is None else {**entry.added, **decided},
        "ranks": _ranks(entry, option, spec, hardware),
        "container": _recipe_image(entry),
    }


def _decided(written: ModelConfig, spec: ModelConfig, option: Option) -> dict[str, Any]:
    """The keys that a start decides. written: the entry before."""
    decided: dict[str, Any] = {"model": spec.model} if spec.model != written.model else {}
    if is_open(written.quantize) and isinstance(spec.quantize, QuantizationRecipe):
        decided["quantize"] = spec.quantize.canonical() if spec.quantize.rules else spec.quantize.default.spelling
    if written.max_model_len == AUTO:
        decided["max_model_len"] = spec.max_model_len
    for key in ("tool_call_parser", "reasoning_parser"):
        if getattr(written, key) is None and getattr(spec, key) not in (None, OFF):
            decided[key] = getattr(spec, key)
    # No entry asks for stages of a pipeline: `tensor_parallel: auto` takes them.
    if written.tensor_parallel == AUTO and option.ways[0] > 1 and option.ways[1] == 1:
        decided["tensor_parallel"] = option.ways[0]
    return decided


def _ranks(entry: PlannedEntry, option: Option, spec: ModelConfig, hardware: Hardware) -> list[dict[str, Any]]:
    fields = rank_fields(entry.config, spec, hardware.platform, entry.entrypoint, entry.vllm)
    own_env = without_cpu_space(spec, entry.env)
    flags = fields.pop("flags")
    network = _network(hardware, option.nodes, own_env)
    ranks = []
    for number in range(option.nodes):
        own: dict[str, Any] = {
            "flags": [*flags, *parallel_flags(*option.ways, number, "HEAD", MASTER_PORT, spec.executor)],
            "env": fields["env"] | network | own_env,
            "ray": {"address": "HEAD", "group": "sparkd"} if option.nodes > 1 and spec.executor == "ray" else None,
        }
        rank = _rank_at(number, option.nodes, {**fields, **own})
        variables = {name: value for name, value in build_environment(rank, {}).items() if name not in OWN}
        shown = {name: value if _is_shown(name, own_env) else hidden(name) for name, value in variables.items()}
        ranks.append({"node": number, "command": build_command(rank), "environment": shown})
    return ranks


def _rank_at(number: int, nodes: int, fields: Mapping[str, Any]) -> RankSpec:
    """The RankSpec of a start, on a placeholder node."""
    own = {"rank_id": "plan", "generation": 0, "node_id": "node", "run_dir": "/run/sparkd", "log_path": "/dev/null", "config_hash": ""}
    return RankSpec.from_dict({**fields, **own, "rank": number, "world": nodes})


def _network(hardware: Hardware, nodes: int, configured: Mapping[str, str]) -> dict[str, str]:
    """The variables of sparkd.fabric.environment for each rank, as far as they are known without the nodes' interfaces."""
    variables = dict(JIT_CAPS) if hardware.unified else {}
    return variables | (expected(rdma=wants_rdma(hardware.platform, configured)) if nodes > 1 else {})


def _is_shown(name: str, own: Mapping[str, str]) -> bool:
    """Whether a variable is shown: sparkd sets it, or it is one of the entry's that engines and kernels read, and no secret."""
    return name not in own or (name.startswith(FAMILIES) and not _SECRET.search(name))


def _recipe_image(entry: PlannedEntry) -> dict[str, Any] | None:
    """The container image of the entry's recipe."""
    if entry.spec.recipe is None:
        return None
    file, _ = entry.config.book().read(entry.spec.recipe)
    container = None if file is None else file.recipe.container
    return None if container is None else {**container.model_dump(), "recipe": entry.spec.recipe}


def hidden(name: str) -> str:
    """Stands for a value that is its operator's alone: the shell that runs the command has it in its environment."""
    return f"${{{name}}}"
