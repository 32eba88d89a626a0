"""Converts eugr's (version 1) and sparkrun's (version 2) recipes to sparkd's, with a note on each loss.

eugr/spark-vllm-docker, run-recipe.py and recipes/README.md; spark-arena/sparkrun, RECIPES.md: fields, placeholders, precedence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from sparkd.config import yaml_file
from sparkd.config.engine_flags import arguments
from sparkd.config.overlay import error_of
from sparkd.errors import ConfigError
from sparkd.recipes.dropped_settings import translated
from sparkd.recipes.file import is_foreign
from sparkd.recipes.vllm_command import Command, as_argument, read_arguments, read_command, set_variable
from sparkd.vllm.arg_check import RefusedArg
from sparkd.vllm.flags import DRAFTS, SPECULATIVE, json_object, value_of, words
from sparkd.vllm.parsers import OFF
from sparkd.vllm.reserved_args import owned_env

_HOOKS = ("pre_exec", "post_exec", "post_commands", "mods", "build_args", "builder")
_TAKEN = (
    "recipe_version", "sparkrun_version", "name", "description", "model", "model_revision", "runtime", "container", "min_nodes",
    "max_nodes", "solo_only", "cluster_only", "mode", "defaults", "env", "command", "metadata",
)  # fmt: skip
_FORMATS = {"1": "eugr/spark-vllm-docker", "2": "sparkrun"}
_RUNTIMES = ("", "vllm", "vllm-distributed", "vllm-ray", "eugr-vllm")
_PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_][A-Za-z0-9_-]*)\}")
_BRACES = re.compile(rf"\{{\{{|{_PLACEHOLDER.pattern}|\}}\}}")
# The longest published command has some 2,000 characters.
MAX_COMMAND = 65536
# Variables by which launchers and torch tell a process its node or rank; sparkd places the ranks of a model itself.
_RANKS = frozenset(
    {
        "NNODES", "NUM_NODES", "NODE_COUNT", "NODE_RANK", "NODE_IP", "HEAD_IP", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK",
        "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "CLUSTER_NODES", "NPROC_PER_NODE", "VLLM_NNODES",
    }
)  # fmt: skip
# Flags whose value is a file. A relative path comes from a mod or from the launcher's image.
_FILES = ("chat-template", "tool-parser-plugin", "reasoning-parser-plugin")
_PARSER_FLAGS = ("--tool-call-parser", "--reasoning-parser")
# Images with an unchanged vLLM: vLLM's own, NVIDIA's, and eugr's builds.
_PLAIN_BUILDS = (
    "", "vllm-openai", "vllm", "vllm-node", "vllm-node-tf5", "spark-vllm", "dgx-vllm-eugr-nightly", "dgx-vllm-eugr-nightly-tf5",
)  # fmt: skip
_PLAIN = re.compile(r"[^\s{}]+")

# (arguments, variables) -> (version, arguments that this vLLM's parser refuses); None without a vLLM.
Parser = Callable[[Sequence[str], Mapping[str, str]], tuple[str, Sequence[RefusedArg]] | None]


def no_parser(_args: Sequence[str], _env: Mapping[str, str]) -> None:
    """The Parser for an import without vLLM."""


@dataclass(frozen=True, slots=True)
class Imported:
    """A recipe in sparkd's format.

    recipe: plain values; text: the same as a file.
    notes: a sentence for each difference from the source.
    missing: a sentence for each file or module that the command uses and neither the recipe nor vLLM provides, shown before the notes.
    risks: a sentence for each setting that runs foreign code or reads this machine's files, shown first (recipe_check.validated).
    """

    recipe: Mapping[str, Any]
    text: str
    notes: tuple[str, ...]
    missing: tuple[str, ...] = ()
    risks: tuple[str, ...] = ()


def imported(
    raw: bytes,
    shown: str,
    overrides: Mapping[str, Any] | None = None,
    parser: Parser = no_parser,
    origin: str = "",
) -> Imported:
    """Another format's recipe as one of ours. Raises ConfigError with file, key, reason and cure.

    overrides: -o KEY=VALUE, over the recipe's defaults.
    parser: asks this machine's vLLM, which must accept the arguments.
    origin: the source of the file, empty where only its format is known.
    """
    document = yaml_file.parse(raw, shown, {}, last_counts=True)
    if document.problems:
        raise error_of(document.problems)
    try:
        return _imported(document, shown, dict(overrides or {}), parser, origin)
    except ConfigError as error:
        raise error if error.file else ConfigError(error.message, file=shown) from None


def substituted(text: str, values: Mapping[str, Any]) -> str:
    """`text` with each {key} replaced by its value; an unknown {key} stays.

    A brace of JSON is no placeholder, because it holds more than a name. Double braces are escaped braces where the text has '{{', which
    never occurs in JSON; '}}' alone does, at the end of nested maps.
    """
    filled = {name: as_argument(value) for name, value in values.items()}
    if sum(len(filled.get(name, "")) for name in _PLACEHOLDER.findall(text)) > MAX_COMMAND:
        raise ConfigError(f"its command has more than {MAX_COMMAND} characters once its defaults are put in: write them out.")
    # From left to right, as str.format reads them: in '{n}}}' the first brace ends a placeholder, and only the others are an escape.
    escaped = {"{{": "{", "}}": "}"} if "{{" in text else {}
    return _BRACES.sub(lambda match: filled.get(match[1], escaped.get(match[0], match[0])), text)


def _imported(document: yaml_file.Document, shown: str, overrides: dict[str, Any], parser: Parser, origin: str) -> Imported:
    table = document.values
    if not is_foreign(table):
        raise ConfigError("it is in neither of the formats that are imported, eugr's version 1 and sparkrun's.")
    # sparkrun takes every version but 1 as its own (core/recipe.py).
    version = "1" if str(table.get("recipe_version") or ("1" if "build_args" in table or "mods" in table else "2")) == "1" else "2"
    notes = [*document.repeated, *_left_out(table)]
    runtime = str(table.get("runtime") or "")
    if runtime not in _RUNTIMES:
        raise ConfigError(f"runtime is {runtime!r}, and sparkd runs vLLM only.")
    defaults = table.get("defaults") or {}
    if not isinstance(defaults, Mapping):
        raise ConfigError("defaults must be a map of 'key: value' lines.")
    values = {**defaults, **overrides}
    if "tensor_parallel" not in overrides and (note := _on_one_node(table, defaults.get("tensor_parallel", 1), version)):
        values["tensor_parallel"] = 1
        notes.append(note)
    if isinstance(table.get("model"), str):
        values.setdefault("model", table["model"])
    command = _command(table, values, version, notes)
    model = command.model or values.get("model")
    if not isinstance(model, str) or "{" in model:
        raise ConfigError("model is missing: give it, or name it in the command.")
    recipe = _recipe(table, command, model, version, notes)
    recipe["sources"] = {"file": origin or f"a recipe in the format of {_FORMATS[version]}"}
    missing = tuple(_missing(table, recipe["settings"], parser))
    return Imported(recipe, _text(recipe, shown, version, missing, notes), tuple(notes), missing)


def _on_one_node(table: Mapping[str, Any], size: Any, version: str) -> str | None:
    """A note on why the recipe's number of ranks becomes 1; None where it stays. On one node eugr's launcher always starts one rank
    (run-recipe.py, is_solo), because a Spark has one GPU."""
    nodes = _nodes(table) or {}
    if str(size) == "1" or nodes.get("min", 1) > 1:
        return None
    if nodes.get("max") == 1:
        return f"tensor_parallel is 1 in place of {size}: the recipe is for one node."
    if version != "1" or "{tensor_parallel}" not in str(table.get("command")):
        return None
    more = f"On {size} nodes it takes {size}: import it with -o tensor_parallel={size} for those."
    return f"tensor_parallel is 1 in place of {size}, as its launcher has it on one node. {more}"


def parser_flags(settings: Mapping[str, Any]) -> list[str]:
    """The flags of a recipe's keys that name a parser, before its extra_args."""
    named = [(flag, settings.get(flag[2:].replace("-", "_"))) for flag in _PARSER_FLAGS]
    flags = [word for flag, name in named if isinstance(name, str) and name not in (OFF, "off") for word in (flag, name)]
    return [*flags, *arguments(settings)]


def _missing(table: Mapping[str, Any], settings: Mapping[str, Any], parser: Parser) -> Iterator[str]:
    """Sentences about files and modules that are missing on this machine. settings: translated for vLLM. Raises ConfigError
    for an argument that vLLM refuses or a parser that it lacks, where the recipe has neither a mod nor the image of a fork."""
    args, env, chosen = settings.get("extra_args", []), settings.get("env", {}), parser_flags(settings)
    brought = [key for key in ("mods", "pre_exec", "build_args") if table.get(key)]
    listed = table.get("mods")
    mods = [mod for mod in (listed if isinstance(listed, list) else [listed]) if isinstance(mod, str) and _PLAIN.fullmatch(mod)]
    named = f" ({', '.join(mods[:4])})" if mods else ""
    whose = f"its {' or '.join(brought)}{named} may bring" if brought else "its launcher's image may have"
    for name in _FILES:
        value = value_of(args, name)
        if value is not None and not value.startswith("/") and _PLAIN.fullmatch(value):
            yield f"--{name} {value} is a file that {whose}: get the file, and write its full path there."
    if not chosen or (answer := parser(chosen, env)) is None:
        return
    version, refusals = answer
    if refusals and not brought and not is_fork(table.get("container")):
        raise ConfigError(f"vLLM would refuse an argument of this recipe. {refusals[0].note(version)}")
    for refusal in refusals:
        if refusal.flag in _PARSER_FLAGS:
            yield f"{refusal.note(version)} If {whose} it, use an image that has it."
        elif refusal.is_unknown:
            yield f"{refusal.flag} is not a flag of vLLM {version}, but one that {whose}: remove it, or use an image that has it."


def is_fork(image: Any) -> bool:
    """Whether a container image has a changed vLLM."""
    name = str(image or "").partition("@")[0].rpartition("/")[2].partition(":")[0]
    return name not in _PLAIN_BUILDS


def _left_out(table: Mapping[str, Any]) -> Iterator[str]:
    for key in table:
        if key in _HOOKS and table[key]:
            yield f"{key} is refused: it runs shell commands or changes the image, which sparkd never does. Use an image that needs none."
        elif key in ("include", "overrides"):
            raise ConfigError(f"{key}: a recipe that is put together from others has to be imported as sparkrun prints it.")
        elif key not in _TAKEN and key not in _HOOKS:
            yield f"{key} is left out: it has no meaning here."


def _command(table: Mapping[str, Any], values: dict[str, Any], version: str, notes: list[str]) -> Command:
    template = table.get("command")
    if isinstance(template, str) and template.strip():
        command = read_command(substituted(template, values))
        _refuse_unfilled(command)
        names = {*_PLACEHOLDER.findall(template), "model", "port", "host", "served_model_name", "distributed_executor_backend"}
        if unused := sorted(values.keys() - names):
            notes.append(f"{', '.join(unused)} in defaults is left out: the command does not name it.")
        if not command.served and isinstance(values.get("served_model_name"), str):
            command.served = [str(values["served_model_name"])]
        notes += command.notes
        return command
    if version == "1":
        raise ConfigError("command is missing, which a recipe of eugr's needs.")
    command = Command()
    read_arguments([word for key, value in values.items() if key != "model" for word in _flag(key, value)], command)
    notes += command.notes
    return command


def _flag(key: str, value: Any) -> list[str]:
    """A default of a recipe without a command: vLLM's flag in snake_case, `tensor_parallel` and its like without their end."""
    name = f"{key.replace('_', '-')}{'-size' if key.endswith('_parallel') else ''}"
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", as_argument(value)]


def _refuse_unfilled(command: Command) -> None:
    """Raise ConfigError for a placeholder without a value, but in the number of ranks, which is dropped, and in flags that sparkd sets
    itself."""
    if _PLACEHOLDER.fullmatch(str(command.settings.get("tensor_parallel"))):
        name = command.settings.pop("tensor_parallel")
        command.notes.append(f"tensor_parallel is left out: {name} has no value here, and auto chooses by the memory of the nodes.")
    texts = [*map(str, command.settings.values()), *command.args, *command.served, *command.env.values(), command.model or ""]
    if missing := next(filter(None, map(_PLACEHOLDER.search, texts)), None):
        raise ConfigError(f"the command names {missing[0]}, and defaults has no such key: import it with -o {missing[1]}=VALUE.")


def _recipe(table: Mapping[str, Any], command: Command, model: str, version: str, notes: list[str]) -> dict[str, Any]:
    env = {**_environment(table.get("env"), notes), **command.env}
    placed = {name: "sparkd places the ranks of a model, and gives each its number" for name in env if name in _RANKS}
    for name, reason in {**placed, **dict(owned_env(env))}.items():
        notes.append(f"{name} is left out: {reason}.")
        del env[name]
    translation = translated(command.args, env)
    notes += translation.notes
    notes += [f"refused: {reason}" for reason in translation.refused]
    drafts = translation.flags.get(DRAFTS)
    if isinstance(drafts, str) and json_object(drafts) is None:
        raise ConfigError(f"{SPECULATIVE} is not JSON: correct it.")
    settings = dict(command.settings)
    if isinstance(table.get("model_revision"), str):
        settings.setdefault("revision", table["model_revision"])
    if command.served:
        settings["served_model_name"] = command.served
    if translation.env:
        settings["env"] = translation.env
    if translation.flags:
        settings["extra_args"] = words(translation.flags)
    metadata = table.get("metadata") if isinstance(table.get("metadata"), Mapping) else {}
    texts = (table.get("description"), (metadata or {}).get("description"), table.get("name"))
    descriptions = [str(text).strip() for text in texts if text]
    recipe: dict[str, Any] = {
        "description": descriptions[0] if descriptions else model,
        "model": model,
        "sources": {},
    }
    if isinstance(table.get("container"), str):
        recipe["container"] = {"image": table["container"], "kind": _kind(table["container"])}
    nodes = _nodes(table)
    alone = (nodes or {}).get("max") == 1 or (version == "1" and (nodes or {}).get("min", 1) == 1)
    if alone and not command.divided:
        settings.setdefault("tensor_parallel", 1)
    if nodes:
        size = settings.get("tensor_parallel")
        if isinstance(size, int) and 1 < nodes.get("min", 1) < size <= nodes.get("max", size):
            nodes["min"] = size  # a Spark has one GPU
        recipe["nodes"] = nodes
        if nodes.get("min", 1) > 1 and size == 1:
            del settings["tensor_parallel"]
            notes.append("tensor_parallel is left out: its nodes are the stages of a pipeline, and auto decides how they share the model.")
    recipe["settings"] = settings
    return recipe


def _environment(env: Any, notes: list[str]) -> dict[str, str]:
    """The variables, with values as text."""
    variables: dict[str, str] = {}
    for name, value in (env if isinstance(env, Mapping) else {}).items():
        set_variable(variables, name, ("1" if value else "0") if isinstance(value, bool) else str(value), notes)
    return variables


def _nodes(table: Mapping[str, Any]) -> dict[str, int] | None:
    """The recipe's `nodes` section. solo_only, cluster_only and mode are older names for max_nodes: 1 and min_nodes: 2."""
    least, most = table.get("min_nodes"), table.get("max_nodes")
    if table.get("solo_only") is True or table.get("mode") == "solo":
        most = 1
    if table.get("cluster_only") is True or table.get("mode") == "cluster":
        least = max(2, least) if isinstance(least, int) else 2
    counts = {"min": least, "max": most}
    return {name: count for name, count in counts.items() if isinstance(count, int) and not isinstance(count, bool)} or None


def _kind(image: str) -> str:
    """The kind of an image, by its repository's name without registry and tag."""
    place, _, last = image.partition("@")[0].rpartition("/")
    name = last.partition(":")[0]
    if name == "vllm-openai":
        return name
    return "ngc" if name == "vllm" and place.endswith("nvidia") else "other"


def _text(recipe: Mapping[str, Any], shown: str, version: str, missing: tuple[str, ...], notes: list[str]) -> str:
    head = [f"# Imported from {shown.rpartition('/')[2]}, in the format of {_FORMATS[version]}."]
    if missing:
        head += ["#", "# MISSING:", *(f"# {line}" for line in missing), "#"]
    head += [f"# {line}" for note in notes for line in note.splitlines()]
    return "\n".join(head) + "\n" + yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True, width=120)
