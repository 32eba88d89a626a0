"""The start of a planned model: the keys that are decided, and the command and environment of each rank, without a secret of the entry."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sparkd.capacity.container import hidden
from sparkd.capacity.fit import Option
from sparkd.capacity.launch_spec import rank_fields
from sparkd.capacity.planned_entry import PlannedEntry
from sparkd.capacity.profiles import FAMILIES
from sparkd.capacity.requirement import said_to
from sparkd.config.config import ModelConfig
from sparkd.config.quantize import AUTO, is_open
from sparkd.entry.parser_choice import with_parsers
from sparkd.entry.trusted_commits import pinned
from sparkd.errors import ConfigError, LoadRefused
from sparkd.fabric.environment import expected, wants_rdma
from sparkd.hardware import JIT_CAPS, Hardware
from sparkd.vllm.parsers import OFF
from sparkd.vllm.translate import Translation
from workers.quantization.recipe import QuantizationRecipe
from workers.rank.command import build_command, build_environment, parallel_flags
from workers.rank.spec import RankSpec

MASTER_PORT = 29500
# Variables of one start, which a plan does not show.
OWN = ("SPARKD_RANK_ID", "SPARKD_RUN_DIR", "VLLM_RPC_BASE_PATH", "SPT_NOENV", "PATH", "LANG")
_SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)


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
    translation = said_to(spec, entry.config, entry.vllm)
    if translation.refused:
        raise ConfigError(f"{spec.name} cannot be started by the vLLM of its runtime: {translation.refused[0]}", param="model")
    decided = _decided(entry.spec, spec, option)
    return {
        "name": spec.name,
        "configured": entry.added is None,
        "config": decided if entry.added is None else {**entry.added, **decided},
        "ranks": _ranks(entry, option, spec, translation, hardware),
        "container": _container(entry),
        "notes": list(translation.notes),
    }


def _decided(written: ModelConfig, spec: ModelConfig, option: Option) -> dict[str, Any]:
    """The keys that a start decides. written: the entry before."""
    decided: dict[str, Any] = {"model": spec.model} if spec.model != written.model else {}
    if is_open(written.quantize) and spec.quantize is not None:
        recipe = QuantizationRecipe.parse(spec.quantize)
        decided["quantize"] = spec.quantize if recipe.rules else recipe.default.spelling
    if written.max_model_len == AUTO:
        decided["max_model_len"] = spec.max_model_len
    for key in ("tool_call_parser", "reasoning_parser"):
        if getattr(written, key) is None and getattr(spec, key) not in (None, OFF):
            decided[key] = getattr(spec, key)
    # No entry asks for stages of a pipeline: `tensor_parallel: auto` takes them.
    if written.tensor_parallel == AUTO and option.tensor > 1 and option.pipeline == 1:
        decided["tensor_parallel"] = option.tensor
    return decided


def _ranks(entry: PlannedEntry, option: Option, spec: ModelConfig, translation: Translation, hardware: Hardware) -> list[dict[str, Any]]:
    fields = rank_fields(entry.config, spec, hardware.platform, entry.entrypoint, translation, entry.vllm)
    flags = fields.pop("flags")
    network = _network(hardware, option.nodes, translation.env)
    ranks = []
    for number in range(option.nodes):
        own: dict[str, Any] = {
            "flags": [*flags, *parallel_flags(option.tensor, option.pipeline, number, "HEAD", MASTER_PORT, spec.executor)],
            "env": fields["env"] | network | dict(translation.env),
            "ray": {"address": "HEAD", "group": "sparkd"} if option.nodes > 1 and spec.executor == "ray" else None,
        }
        rank = _rank_at(number, option.nodes, {**fields, **own})
        variables = {name: value for name, value in build_environment(rank, {}).items() if name not in OWN}
        shown = {name: value if _is_shown(name, translation.env) else hidden(name) for name, value in variables.items()}
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


def _container(entry: PlannedEntry) -> dict[str, Any] | None:
    """The container image of the entry's recipe."""
    if entry.spec.recipe is None:
        return None
    file, _ = entry.config.book().read(entry.spec.recipe)
    container = None if file is None else file.recipe.container
    return None if container is None else {**container.model_dump(), "recipe": entry.spec.recipe}
