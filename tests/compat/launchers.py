"""The command that another launcher would run for a recipe, worked out from its documented behaviour and not from sparkd's code.

eugr/spark-vllm-docker, `run-recipe.py` (version 1): defaults and `tensor_parallel: 1` on one node are put into the command by Python's
str.format; variables are exported as text. spark-arena/sparkrun, `RECIPES.md` (any other version): `{key}` is replaced again while
something changes, `{{` in a command makes doubled braces single ones, and a recipe without a command has its known defaults as flags.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FIXTURE = Path(__file__).resolve().parent.parent / "fixtures" / "vllm-flags-0.32.0.txt"
_KEY = re.compile(r"\{([^{}]*)\}")
_PASSES = 10
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE]-?\d+)?")
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
_FACTOR = {"k": 1000, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_OPERATOR = re.compile(r"[();<>|&]+")
_SHORT = {
    "-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-dp": "data-parallel-size", "-q": "quantization", "-n": "nnodes",
    "-r": "node-rank", "-sc": "speculative-config", "-cc": "compilation-config", "-ac": "attention-config", "-asc": "api-server-count",
    "-dcp": "decode-context-parallel-size", "-ep": "enable-expert-parallel", "-O": "optimization-level",
}  # fmt: skip
# sparkrun, runtimes/_vllm_common.py: what a recipe without a command may have among its defaults.
_NAMED = {"tensor_parallel": "tensor-parallel-size", "pipeline_parallel": "pipeline-parallel-size", "data_parallel": "data-parallel-size"}
_SWITCHES = (
    "enforce_eager", "enable_prefix_caching", "trust_remote_code", "enable_auto_tool_choice", "enable_chunked_prefill", "async_scheduling",
    "enable_prompt_tokens_details", "enable_force_include_usage", "enable_request_id_headers", "enable_flashinfer_autotune",
    "scheduler_reserve_full_isl", "disable_custom_all_reduce",
)  # fmt: skip
_NEGATED = (
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "async_scheduling",
    "enable_flashinfer_autotune",
    "scheduler_reserve_full_isl",
)


class RefusedThere(Exception):
    """The other launcher ends with an error, or does not start vLLM."""


@dataclass
class Serving:
    """What starts vLLM. flags: name without dashes -> value: true, false, a number, a text, a list of them, or what JSON says."""

    model: str | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


def theirs(table: Mapping[str, Any], nodes: int) -> Serving:
    """nodes: how many there are, which decides what version 1 means. Raises RefusedThere."""
    version = str(table.get("recipe_version") or ("1" if "build_args" in table or "mods" in table else "2"))
    runtime = str(table.get("runtime") or "")
    if runtime not in ("", "vllm", "vllm-ray", "vllm-distributed", "eugr-vllm"):
        raise RefusedThere(f"runtime {runtime}")
    if version == "1" and "command" in table:
        text = _of_format(table, nodes)
    elif isinstance(table.get("command"), str) and table["command"].strip():
        text = _of_sparkrun(table)
    else:
        return _of_defaults(table)
    found = serving(text)
    most = 1 if table.get("solo_only") is True or table.get("mode") == "solo" else table.get("max_nodes")
    ranks = [(table.get("defaults") or {}).get(key) or 1 for key in ("tensor_parallel", "pipeline_parallel", "data_parallel")]
    if version != "1" and isinstance(most, int) and math.prod(ranks) > most:
        raise RefusedThere(f"{math.prod(ranks)} ranks on {most} node")
    if "/" not in (found.model or "/"):
        raise RefusedThere("a model of the hub has an owner")
    found.env = {str(name): str(value) for name, value in (table.get("env") or {}).items()} | found.env
    named = (table.get("defaults") or {}).get("served_model_name")
    if version != "1" and named is not None and "--served-model-name" not in text:
        found.flags["served-model-name"] = str(named)
    return found


def _solo(table: Mapping[str, Any], nodes: int) -> bool:
    cluster = table.get("cluster_only") is True or table.get("mode") == "cluster" or (table.get("min_nodes") or 1) > 1
    return not cluster and (nodes == 1 or table.get("solo_only") is True or table.get("max_nodes") == 1)


def _of_format(table: Mapping[str, Any], nodes: int) -> str:
    values = dict(table.get("defaults") or {})
    if _solo(table, nodes):
        values["tensor_parallel"] = 1
    # sparkrun runs version 1 too and puts the model among the values; only where str.format gives up does it decide.
    try:
        return str(table["command"]).format(**{"model": table.get("model"), **values})
    except (KeyError, ValueError, IndexError):
        return _of_sparkrun({**table, "defaults": values})


def _of_sparkrun(table: Mapping[str, Any]) -> str:
    values = {"model": table.get("model"), **(table.get("defaults") or {})}
    text = str(table["command"]).strip()
    escapes = "{{" in text
    out, at = "", 0
    while at < len(text):
        doubled = text[at : at + 2] if text[at : at + 2] in ("{{", "}}") else ""
        match = _KEY.match(text, at)
        if doubled:
            out += ("\0" if doubled[0] == "{" else "\1") * (1 if escapes else 2)
            at += 2
        elif match:
            out += match[0]
            at = match.end()
        else:
            out += {"{": "\0", "}": "\1"}.get(text[at], text[at])
            at += 1
    for _ in range(_PASSES):
        made = _KEY.sub(lambda match: str(values[match[1]]) if values.get(match[1]) is not None else match[0], out)
        if made == out:
            break
        out = made
    return out.replace("\0", "{").replace("\1", "}")


def _of_defaults(table: Mapping[str, Any]) -> Serving:
    found = Serving(str(table.get("model")), {}, {str(name): str(value) for name, value in (table.get("env") or {}).items()})
    for key, value in (table.get("defaults") or {}).items():
        name = _NAMED.get(key, key.replace("_", "-"))
        if value is None:
            continue
        if key in _SWITCHES:
            if str(value).lower() in ("true", "yes", "on", "1"):
                found.flags[name] = True
            elif key in _NEGATED:
                found.flags[name] = False
        else:
            found.flags[name] = read(json.dumps(value) if isinstance(value, dict | list) else str(value))
    return found


# Reading a command line


def serving(text: str) -> Serving:
    """The one `vllm serve` of a script, and what it exports before. Raises RefusedThere."""
    env: dict[str, str] = {}
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\[ \t]*(?:\n|$)", " ", kept).splitlines():
        lexer = shlex.shlex(line.rstrip().removesuffix(";"), posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split, lexer.commenters = True, ""
        try:
            words = list(lexer)
        except ValueError as error:
            raise RefusedThere(f"the shell: {error}") from None
        if any(_OPERATOR.fullmatch(word) for word in words):
            raise RefusedThere("it needs a shell")
        words = words[1:] if words[:1] in (["export"], ["env"], ["exec"]) else words
        while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0], re.DOTALL):
            name, _, value = words.pop(0).partition("=")
            env[name] = value
        for start in (["vllm", "serve"], ["python3", "-m", "vllm.entrypoints.openai.api_server"]):
            if words[: len(start)] == start:
                found = arguments(words[len(start) :])
                found.env = env
                return found
    raise RefusedThere("no `vllm serve`")


def arguments(words: Sequence[str]) -> Serving:
    """As vLLM's parser reads them: beginnings of a flag, underscores, `--flag.key`, `--no-flag`, the last one counts."""
    found = Serving()
    for word, values in _pairs(words):
        if not word:
            found.model = found.model or values[0]
            continue
        spelled, _, inner = word.partition(".")
        name = _named(spelled)
        if name == "model" and values:
            found.model = values[0]
            continue
        negated = name.startswith("no-") and not values and name not in _spellings()
        value: Any = True if not values else read(values[0]) if len(values) == 1 else [read(each) for each in values]
        if name.startswith("no-") and not values:
            name, value = name[3:], False
        elif negated:
            value = False
        if inner:
            whole = found.flags.setdefault(name, {})
            *path, last = inner.split(".")
            for key in path:
                whole = whole.setdefault(key, {})
            whole[last] = value
        else:
            found.flags[name] = value
    return found


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(flag, values); a word that belongs to none under ''."""
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("-") or _NUMBER.fullmatch(word):
            yield "", [word]
            continue
        flag, equals, value = word.partition("=")
        if equals:
            yield flag, [value]
            continue
        values = []
        many = _named(flag.partition(".")[0]) in ("served-model-name", "lora-modules", "middleware", "cudagraph-capture-sizes")
        while at < len(words) and (not words[at].startswith("-") or _NUMBER.fullmatch(words[at])) and (many or not values):
            if _named(flag) in _bare():
                break
            values.append(words[at])
            at += 1
        yield flag, values


def _named(spelled: str) -> str:
    if not spelled.startswith("--"):
        return _SHORT.get(spelled, spelled)
    name = spelled[2:].replace("_", "-")
    known = _spellings()
    longer = {known[each] for each in known if each.startswith(name)}
    if name in known or len(longer) != 1:
        return name
    full = longer.pop()
    return f"no-{full}" if name.startswith("no-") and not full.startswith("no-") else full


def _spellings() -> dict[str, str]:
    """Every long spelling of vLLM 0.32 -> the first of the same option."""
    found: dict[str, str] = {}
    for line in _FIXTURE.read_text().splitlines():
        if line and not line.startswith("#"):
            names = [word[2:] for word in line.split()[1:] if word.startswith("--")]
            found |= dict.fromkeys(names, names[0])
    return found


def _bare() -> frozenset[str]:
    """Switches: what has a spelling with `no-`, and these."""
    names = _spellings()
    return frozenset({name for name in names if f"no-{name}" in names or name.startswith("no-")} | {"headless"})


def read(text: str) -> Any:
    """A value as vLLM would: JSON, a number, 128K, true; else the text."""
    if match := _AMOUNT.fullmatch(text):
        return int(float(match[1]) * _FACTOR[match[2]])
    if text[:1] in "{[" or _NUMBER.fullmatch(text):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return {"true": True, "false": False}.get(text.lower(), text)
