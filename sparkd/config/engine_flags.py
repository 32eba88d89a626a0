"""Writes a model's keys as vLLM's flags, and reads the flags in extra_args that are keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from sparkd.config import kv_cache as kv_sizing
from sparkd.config.fields import VllmFlag
from sparkd.config.yaml_file import Items, Location, Map, places_in
from sparkd.vllm.flags import flags_in
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
        value = kv_sizing.share_of(model)[0] if key == "gpu_memory_utilization" else getattr(model, key)
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


def with_flags_as_keys(written: Map) -> tuple[Map, list[str]]:
    """(an entry or the settings of a recipe, in which each flag in extra_args that has a key is that key; the keys that stood there too).

    The last of several flags counts, as in vLLM. `--no-SWITCH` stays a flag, and so does one with more or fewer values than its key has.
    """
    flags = [*flags_in(arguments(written))]
    if not flags:
        return written, []
    args, keys, both, rest = written["extra_args"], Map(written, written.places), list[str](), list[int]()
    places = [places_in(args).get(index, Location()) for index in range(len(args))]
    for flag, end in zip(flags, [*(flag.place for flag in flags[1:]), len(args)], strict=True):
        key = keys_by_flag().get(flag.name)
        both += [key] if key is not None and written.get(key) is not None else []
        if key is None or (flag.value is not True if key in SWITCHES else not isinstance(flag.value, str)):
            rest += range(flag.place, end)
            continue
        # No message shows a value of extra_args.
        keys[key], keys.places[key] = flag.value, replace(places[flag.place], secret=True)
    keys["extra_args"] = Items([args[index] for index in rest], [places[index] for index in rest])
    return keys, both


@cache
def keys_by_flag() -> Mapping[str, str]:
    """The key of each flag, without its dashes, that has one."""
    from sparkd.config.model import ModelConfig

    return {key.replace("_", "-"): key for key in (*value_flags(ModelConfig), *SWITCHES, "tool_call_parser")}
