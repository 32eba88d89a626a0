"""Owns what eugr's (version 1) and sparkrun's (version 2) recipes mean here: one of ours, and what was left out. Never runs their hooks.

eugr/spark-vllm-docker, run-recipe.py and recipes/README.md; spark-arena/sparkrun, RECIPES.md: fields, placeholders, precedence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from sparkd import yamlfile
from sparkd.config_source import error_of
from sparkd.errors import ConfigError
from sparkd.recipe_command import Command, as_argument, read_arguments, read_command
from sparkd.vllm_flags import SPECULATIVE, translated, values_of, without
from sparkd.vllm_history import READ_OFF, Release

_FOREIGN = (
    "recipe_version", "command", "defaults", "runtime", "min_nodes", "max_nodes", "solo_only", "cluster_only", "build_args", "mods", "env",
)  # fmt: skip
_HOOKS = ("pre_exec", "post_exec", "post_commands", "mods", "build_args", "builder", "builder_config", "stop_after_post")
_TAKEN = (
    "recipe_version", "sparkrun_version", "name", "description", "model", "model_revision", "runtime", "container", "min_nodes",
    "max_nodes", "solo_only", "cluster_only", "mode", "defaults", "env", "command", "metadata",
)  # fmt: skip
_RUNTIMES = ("", "vllm", "vllm-distributed", "vllm-ray", "eugr-vllm")
# A recipe of version 2 without a command: its defaults are vLLM's flags in snake_case, these three shortened.
_RENAMED = {"tensor_parallel": "tensor-parallel-size", "pipeline_parallel": "pipeline-parallel-size", "data_parallel": "data-parallel-size"}
# What vLLM does unless told otherwise, so that `false` has to be said.
_NEGATED = ("enable_prefix_caching", "enable_chunked_prefill", "async_scheduling", "enable_flashinfer_autotune")
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_BRACES = re.compile(rf"\{{\{{|{_PLACEHOLDER.pattern}|\}}\}}")
_ROUNDS = 8
# Defaults that name each other double with every round. The longest published command has some 2,000 characters.
MAX_COMMAND = 65536
_OPEN, _CLOSE = "\x01", "\x02"
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
_DRAFT_KEYS = {"method", "num_speculative_tokens", "model", "moe_backend"}


@dataclass(frozen=True, slots=True)
class Imported:
    """recipe: ours, plain values. text: the same as a file. notes: one sentence for each thing that is not as it was."""

    recipe: Mapping[str, Any]
    text: str
    notes: tuple[str, ...]


def is_foreign(table: Mapping[str, Any]) -> bool:
    """Whether a recipe's file is in one of the other formats."""
    return "sources" not in table and any(key in table for key in _FOREIGN)


def imported(raw: bytes, shown: str, overrides: Mapping[str, Any] | None = None, release: Release = READ_OFF) -> Imported:
    """Another format's recipe as one of ours. Raises ConfigError with file, key, reason and cure.

    overrides: -o KEY=VALUE, over the recipe's defaults. release: the vLLM that its flags are translated for.
    """
    document = yamlfile.parse(raw, shown, {}, last_counts=True)
    if document.problems:
        raise error_of(document.problems)
    try:
        return _imported(document, shown, dict(overrides or {}), release)
    except ConfigError as error:
        raise error if error.file else ConfigError(error.message, file=shown) from None


def substituted(text: str, values: Mapping[str, Any], collapse: bool) -> str:
    """`text` with {key} replaced, again while something is; an unknown {key} stays as it is.

    A brace of JSON is no placeholder, for it holds more than a name. collapse: '{{' is an escaped brace, as in version 1, and in
    version 2 wherever it stands.
    """
    # From left to right, as str.format reads them: in '{n}}}' the first brace ends a placeholder, and only the others are an escape.
    escaped = {"{{": _OPEN, "}}": _CLOSE} if collapse or "{{" in text else {}
    added = 0

    def fill(match: re.Match[str]) -> str:
        nonlocal added
        filled = as_argument(values[match[1]]) if match[1] in values else escaped.get(match[0], match[0])
        added += len(filled)
        if added > MAX_COMMAND:
            raise ConfigError(f"its command has more than {MAX_COMMAND} characters once its defaults are put in: write them out.")
        return filled

    text = _BRACES.sub(fill, text)
    for _ in range(_ROUNDS):
        replaced = _PLACEHOLDER.sub(fill, text)
        if replaced == text:
            break
        text = replaced
    return text.replace(_OPEN, "{").replace(_CLOSE, "}")


def _imported(document: yamlfile.Document, shown: str, overrides: dict[str, Any], release: Release) -> Imported:
    table = document.table
    if not is_foreign(table):
        raise ConfigError("it is in neither of the formats that are imported, eugr's version 1 and sparkrun's version 2.")
    version = str(table.get("recipe_version") or ("1" if "build_args" in table or "mods" in table else "2"))
    if version not in ("1", "2"):
        raise ConfigError(f"recipe_version is {version!r}; 1 (eugr) and 2 (sparkrun) are read.")
    notes = [*document.repeated, *_left_out(table)]
    runtime = str(table.get("runtime") or "")
    if runtime not in _RUNTIMES:
        raise ConfigError(f"runtime is {runtime!r}, and sparkd runs vLLM only.")
    defaults = table.get("defaults") or {}
    if not isinstance(defaults, Mapping):
        raise ConfigError("defaults must be a map of 'key: value' lines.")
    values = {**defaults, **overrides}
    if (_nodes(table) or {}).get("max") == 1 and "tensor_parallel" not in overrides and defaults.get("tensor_parallel", 1) != 1:
        # As their launcher has it on one node (run-recipe.py, main), where a Spark has one GPU.
        values["tensor_parallel"] = 1
        notes.append(f"tensor_parallel is 1 in place of {defaults['tensor_parallel']}: the recipe is for one node.")
    if isinstance(table.get("model"), str):
        values["model"] = table["model"]
    command = _command(table, values, version, notes)
    model = command.model or table.get("model")
    if not isinstance(model, str) or "{" in model:
        raise ConfigError("model is missing: give it, or name it in the command.")
    recipe = _recipe(table, command, model, version, release, notes)
    return Imported(recipe, _text(recipe, shown, version, notes), tuple(notes))


def _left_out(table: Mapping[str, Any]) -> Iterator[str]:
    for key in table:
        if key in _HOOKS and table[key]:
            yield f"{key} is refused: it runs shell commands or changes the image, which sparkd never does. Have an image that needs none."
        elif key in ("include", "overrides"):
            raise ConfigError(f"{key}: a recipe that is put together from others has to be imported as sparkrun prints it.")
        elif key not in _TAKEN and key not in _HOOKS:
            yield f"{key} is left out: it has no meaning here."


def _command(table: Mapping[str, Any], values: dict[str, Any], version: str, notes: list[str]) -> Command:
    template = table.get("command")
    if isinstance(template, str) and template.strip():
        names = set(_PLACEHOLDER.findall(template)) | {name for value in values.values() for name in _PLACEHOLDER.findall(str(value))}
        command = read_command(substituted(template, values, version == "1"))
        if unused := sorted(set(values) - names - {"model", "port", "host", "served_model_name", "distributed_executor_backend"}):
            notes.append(f"{', '.join(unused)} in defaults is left out: the command does not name it.")
        if not command.served and isinstance(values.get("served_model_name"), str):
            command.served = [str(values["served_model_name"])]
        notes += command.notes
        return command
    if version == "1":
        raise ConfigError("command is missing, and eugr's recipes are nothing without it.")
    command, words = Command(), list[str]()
    for key, value in values.items():
        if key == "model":
            continue
        flag = "--" + _RENAMED.get(key, key.replace("_", "-"))
        state = value if isinstance(value, bool) else {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}.get(str(value).lower())
        if state is True:
            words.append(flag)
        elif state is False:
            words += [f"--no-{key.replace('_', '-')}"] if key in _NEGATED else []
        else:
            words += [flag, substituted(as_argument(value), values, False)]
    read_arguments(words, command)
    notes += command.notes
    return command


def _recipe(table: Mapping[str, Any], command: Command, model: str, version: str, release: Release, notes: list[str]) -> dict[str, Any]:
    said = translated(command.args, {**_environment(table.get("env"), notes), **command.env}, release)
    notes += said.notes
    notes += [f"refused: {reason}" for reason in said.refused]
    args, speculative = _speculation(list(said.args), notes)
    settings = dict(command.settings)
    if isinstance(table.get("model_revision"), str):
        settings.setdefault("revision", table["model_revision"])
    if command.served:
        settings["served_model_name"] = command.served
    if said.env:
        settings["env"] = dict(said.env)
    if args:
        settings["extra_args"] = args
    metadata = table.get("metadata") if isinstance(table.get("metadata"), Mapping) else {}
    told = [str(text).strip() for text in (table.get("description"), (metadata or {}).get("description"), table.get("name")) if text]
    recipe: dict[str, Any] = {
        "description": told[0] if told else model,
        "model": model,
        "sources": {"file": f"a recipe of {'eugr/spark-vllm-docker' if version == '1' else 'sparkrun'}"},
    }
    if isinstance(table.get("container"), str):
        recipe["container"] = {"image": table["container"], "kind": _kind(table["container"])}
    if nodes := _nodes(table):
        recipe["nodes"] = nodes
        if nodes.get("min", 1) > 1 and settings.get("tensor_parallel") == 1:
            del settings["tensor_parallel"]
            notes.append("tensor_parallel is left out: its nodes are the stages of a pipeline, and auto decides how they share the model.")
    recipe["settings"] = settings
    if speculative:
        recipe["speculative"] = speculative
    return recipe


def _environment(env: Any, notes: list[str]) -> dict[str, str]:
    """Values as text. A variable of the shell in one is looked up by whoever uses the recipe: ${env.NAME} is how our files say it."""
    found: dict[str, str] = {}
    for name, value in (env if isinstance(env, Mapping) else {}).items():
        text = ("1" if value else "0") if isinstance(value, bool) else str(value)
        used = sorted({first or second for first, second in _VARIABLE.findall(text)})
        if used == ["HF_TOKEN"] and name == "HF_TOKEN":
            notes.append("env.HF_TOKEN is left out: engines inherit it from sparkd.")
            continue
        if used:
            notes.append(f"env.{name} takes {', '.join(used)} from the environment of whoever uses the recipe: see that this is meant.")
        found[name] = _VARIABLE.sub(lambda match: "${env." + (match[1] or match[2]) + "}", text)
    return found


def _speculation(args: list[str], notes: list[str]) -> tuple[list[str], dict[str, Any] | None]:
    """The configuration of speculative decoding as a choice, where it says nothing that a choice cannot say."""
    found = list(values_of(args, SPECULATIVE[2:]))
    if len(found) != 1:
        return args, None
    try:
        config = json.loads(found[0][2])
    except ValueError:
        raise ConfigError(f"{SPECULATIVE} is not JSON: mend it.") from None
    method = str(config.get("method"))
    if method.endswith("_mtp"):
        notes.append(f"the method {method} is called mtp now (vLLM, config/speculative.py).")
        method = "mtp"
    if method not in ("mtp", "dflash") or not set(config) <= _DRAFT_KEYS:
        return args, None
    draft = {key: config[key] for key in ("num_speculative_tokens", "model", "moe_backend") if key in config}
    return without(args, SPECULATIVE[2:]), {"default": method, method: draft}


def _nodes(table: Mapping[str, Any]) -> dict[str, int] | None:
    """solo_only, cluster_only and mode are older names of max_nodes: 1 and min_nodes: 2."""
    least, most = table.get("min_nodes"), table.get("max_nodes")
    if table.get("solo_only") is True or table.get("mode") == "solo":
        most = 1
    if table.get("cluster_only") is True or table.get("mode") == "cluster":
        least = max(2, least) if isinstance(least, int) else 2
    found = {"min": least, "max": most}
    return {name: count for name, count in found.items() if isinstance(count, int) and not isinstance(count, bool)} or None


def _kind(image: str) -> str:
    """By the repository's name, whatever registry and tag stand before and behind it."""
    place, _, last = image.partition("@")[0].rpartition("/")
    name = last.partition(":")[0]
    if name == "vllm-openai":
        return name
    return "ngc" if name == "vllm" and place.endswith("nvidia") else "other"


def _text(recipe: Mapping[str, Any], shown: str, version: str, notes: list[str]) -> str:
    head = [f"# Imported from {shown.rpartition('/')[2]} ({'eugr, version 1' if version == '1' else 'sparkrun, version 2'})."]
    head += [f"# {line}" for note in notes for line in note.splitlines()]
    return "\n".join(head) + "\n" + yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True, width=120)
