"""Writes a model's keys as vLLM's flags, and names the keys that its extra_args set too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from sparkd.config import kv_cache as kv_sizing
from sparkd.config.fields import VllmFlag
from sparkd.vllm.flags import parsed
from sparkd.vllm.parsers import OFF

if TYPE_CHECKING:
    from sparkd.config.model import ModelConfig

# Keys that are a switch of vLLM: --enforce-eager.
SWITCHES = ("trust_remote_code", "enforce_eager")
_SAMPLING_FLAG = "override-generation-config"


@cache
def value_flags(entry: type[BaseModel]) -> tuple[str, ...]:
    """The keys that are a flag of vLLM with a value, in the order of the fields, which the hash of a running engine keeps."""
    return tuple(key for key, field in entry.model_fields.items() if any(isinstance(each, VllmFlag) for each in field.metadata))


def flags_of(model: ModelConfig) -> list[str]:
    """The keys as vLLM flags, in a fixed order, then extra_args unchanged: for argparse the last flag wins.

    The caller adds --model, --served-model-name and the flags of the executor, the ranks and the socket.
    """
    flags: list[str] = []
    for key in value_flags(type(model)):
        value = kv_sizing.utilization_of(model) if key == "gpu_memory_utilization" else getattr(model, key)
        if value is not None and (key, value) != ("reasoning_parser", OFF):
            flags += [f"--{key.replace('_', '-')}", str(value)]
    if model.tool_call_parser not in (None, OFF):
        # vLLM ignores the parser without this switch (cli_args.py: "Required for `--enable-auto-tool-choice`").
        flags += ["--enable-auto-tool-choice", "--tool-call-parser", model.tool_call_parser]
    if model.sampling is not None and (said := model.sampling.flag()):
        flags += [f"--{_SAMPLING_FLAG}", said]
    for key in SWITCHES:
        if getattr(model, key):
            flags.append(f"--{key.replace('_', '-')}")
    return [*flags, *model.extra_args]


def arguments(written: Mapping[str, Any]) -> list[str]:
    """The extra_args of an entry or recipe that is not validated yet; empty where they are no list."""
    args = written.get("extra_args")
    return [str(arg) for arg in args] if isinstance(args, list | tuple) else []


def contradictions(written: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, message) of every key whose flag stands in extra_args too.

    written: the keys of one entry. A flag of an entry may override a key of its recipe.
    """
    from sparkd.config.model import ModelConfig

    flags = parsed(arguments(written))
    for key in (*value_flags(ModelConfig), *SWITCHES, "tool_call_parser", "sampling"):
        flag = _SAMPLING_FLAG if key == "sampling" else key.replace("_", "-")
        if written.get(key) is not None and flag in flags:
            yield key, f"{key} and --{flag} in extra_args set the same: remove one of them."
