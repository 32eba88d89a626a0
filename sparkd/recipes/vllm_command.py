"""Converts a `vllm serve` command line of a script or recipe to an entry's keys, without running it or a shell."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from sparkd.config.engine_flags import SWITCHES, keys_by_flag
from sparkd.config.model import ModelConfig
from sparkd.errors import ConfigError
from sparkd.vllm.flags import SHORT, Value, amount, flags_in, is_value, json_object, parsed, value_of, words
from sparkd.vllm.reserved_args import owned_args

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_SHELL = re.compile(r"[();<>|&]+")
_UNKNOWN = re.compile(r"\$(?:[A-Za-z_{(])|`")
_SHORT_WORD = re.compile(r"(-[A-Za-z]+)(\d*)")
# A flag of a fork of vLLM, from eugr's mod gpu-mem-util-gb: it overrides gpu-memory-utilization.
_GIB = "gpu-memory-utilization-gb"


def _number(text: Any) -> Any:
    """The value of a number's flag; a text such as 128K stays, because the key accepts it."""
    return int(text) if text.isdecimal() else float(text) if _NUMBER.fullmatch(text) else text


def _is_number(kind: Any) -> bool:
    return kind in (int, float) or any(map(_is_number, get_args(kind)))


_KEYS: Mapping[str, str] = {**keys_by_flag(), "tensor-parallel-size": "tensor_parallel"}
# The flag that the key tool_call_parser sets again.
_IMPLIED = "enable-auto-tool-choice"


@dataclass(slots=True)
class Command:
    """The settings in a command line.

    notes: one sentence for each part that was left out.
    divided: whether the ranks form a pipeline or copies of the model.
    """

    model: str | None = None
    served: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    divided: bool = False


def read_command(text: str) -> Command:
    """Read a script whose last line starts vLLM. Lines of `export NAME=value` before it count; others are left out. Raises ConfigError."""
    command = Command()
    words: list[str] | None = None
    for line in _lines(text):
        tokens = _split(line)
        assigned, rest = _assignments(tokens)
        if not rest:
            for name, value in assigned:
                set_variable(command.env, name, value, command.notes)
        elif (served := _served(rest)) is None:
            command.notes.append(f"the line that begins with {rest[0]!r} is not run: sparkd runs no shell.")
        elif words is not None:
            raise ConfigError("command: two lines of it start an engine, and a recipe is one model: split it.")
        else:
            words = served
            for name, value in assigned:
                set_variable(command.env, name, value, command.notes)
    if words is None:
        raise ConfigError("command: it does not start with `vllm serve`, and sparkd runs vLLM only.")
    read_arguments(words, command)
    return command


def read_arguments(arguments: Sequence[str], command: Command) -> None:
    """Add the arguments after `vllm serve` to `command`."""
    full, flags, owned = _in_full(arguments), dict[str, Value](), list[str]()
    for flag in flags_in(full):
        if not flag.name and command.model is None:
            command.model = str(flag.value)
        elif not flag.name:
            command.notes.append(f"{str(flag.value)[:48]!r} is left out: it belongs to no flag.")
        elif flag.name.startswith("-"):
            raise ConfigError(f"command: {flag.name[:48]!r} is not a flag of vLLM in full: write it out.")
    for name, value in parsed(full).items():
        values = value if isinstance(value, tuple) else (value,)
        if name == "model":
            command.model = str(value)
        elif name == "served-model-name":
            command.served += map(str, values)
        elif name == _IMPLIED:
            continue
        elif name not in _KEYS and any(True for _ in owned_args([f"--{name}"])):
            owned.append(f"--{name}")
            command.divided |= name in ("pipeline-parallel-size", "data-parallel-size") and value != "1"
        elif any(_UNKNOWN.search(str(each)) for each in values):
            command.notes.append(f"--{name} is left out: its value comes from a shell's variable. Set it on the model.")
        elif name in _KEYS and (value is True if _KEYS[name] in SWITCHES else isinstance(value, str)):
            command.settings[_KEYS[name]] = _number(value) if _is_number(ModelConfig.model_fields[_KEYS[name]].annotation) else value
        elif name == "kv-cache-memory-bytes" and isinstance(value, str):
            command.settings["kv_cache"] = {"bytes": amount(value) or value}
        elif name == _GIB and isinstance(value, str):
            command.settings["memory_gib"] = _number(value)
        else:
            flags[name] = value
    if owned:
        command.notes.append(f"left out, because sparkd itself sees to it: {', '.join(owned)}.")
    for used, gone in (("memory_gib", "gpu_memory_utilization"), ("kv_cache", "gpu_memory_utilization")):
        if used in command.settings and command.settings.pop(gone, None) is not None:
            command.notes.append(f"{gone} is left out: the command has {used} too, which vLLM uses instead.")
    command.args += words(flags)


def _in_full(arguments: Sequence[str]) -> list[str]:
    """The arguments with short names written out, and with the parts of a JSON flag (`--speculative-config.method mtp`) joined to one."""
    full, parts = list[str](), dict[str, dict[str, Any]]()
    rest = list(reversed(arguments))
    while rest:
        word = rest.pop()
        written, equals, value = word.partition("=")
        head, _, path = written.partition(".")
        short = _SHORT_WORD.fullmatch(head)
        if is_value(word) or (short is not None and short[1] not in SHORT):
            full.append(word)
            continue
        if short is not None:
            head, value, equals = f"--{SHORT[short[1]]}", short[2] or value, equals or short[2]
        if path:
            text = value if equals else rest.pop() if rest and is_value(rest[-1]) else "true"
            if "." in path:
                raise ConfigError(f"command: {written[:48]} sets a part of a part: write {head} as one JSON value.")
            parts.setdefault(head[2:].replace("_", "-"), {})[path] = _json(text)
        else:
            full += [f"{head}={value}"] if equals else [head]
    for name, part in parts.items():
        whole = value_of(full, name) or "{}"
        if (config := json_object(whole)) is None:
            raise ConfigError(f"--{name} is not JSON: correct it.")
        full.append(f"--{name}={json.dumps({**config, **part})}")
    return full


def _json(text: str) -> Any:
    """The value of a part as vLLM reads it: JSON, else text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _lines(text: str) -> list[str]:
    """The lines of a script, with continuations joined, also after a backslash with blanks; without comments and empty lines."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\[ \t]*(?:\n|$)", " ", "\n".join(lines))
    # A semicolon at the end of a line has no effect.
    return [line for each in joined.splitlines() if (line := each.strip().removesuffix(";").rstrip())]


def _split(line: str) -> list[str]:
    """Split a line like a shell. Raises ConfigError for a line that only a shell could evaluate."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        tokens = list(lexer)
    except ValueError as error:
        raise ConfigError(f"command: it cannot be split into words ({str(error).lower()}): correct its quotes.") from None
    if shell := next((token for token in tokens if _SHELL.fullmatch(token)), None):
        raise ConfigError(f"command: {shell!r} is for a shell, and sparkd runs none: leave one `vllm serve` line.")
    return tokens


def _assignments(tokens: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """(NAME=value pairs at the beginning of a line, also after `env` or `export`; the remaining words)."""
    pairs: list[tuple[str, str]] = []
    rest = tokens[1:] if tokens and tokens[0] in ("export", "env", "exec") else tokens
    while rest and (match := _ASSIGNMENT.fullmatch(rest[0])):
        pairs.append((match[1], match[2]))
        rest = rest[1:]
    return pairs, rest


def _served(words: list[str]) -> list[str] | None:
    """The arguments of a command that starts vLLM's server; None for any other command."""
    is_server = len(words) > 1 and words[0].rpartition("/")[2] == "vllm" and words[1] == "serve"
    return words[2:] if is_server else None


def set_variable(variables: dict[str, str], name: str, value: str, notes: list[str]) -> None:
    """Set a variable of the engine's environment, or note why it is left out."""
    if _UNKNOWN.search(value):
        reason = "its value comes from a shell's variable"
        notes.append(f"{name} is left out: {reason}. Engines inherit HF_TOKEN from sparkd; set another in the model's 'env:'.")
    else:
        variables[name] = value


def as_argument(value: Any) -> str:
    """A default's value in the flag's spelling."""
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
