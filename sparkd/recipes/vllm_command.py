"""Owns converting a `vllm serve` command line of a script or recipe to an entry's keys. Never runs the command or a shell."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkd.errors import ConfigError
from sparkd.schema.engine_flags import SWITCHES, VALUE_FLAGS
from sparkd.vllm.arg_check import amount
from sparkd.vllm.reserved_args import owned_args
from sparkd.vllm.translate import SPECULATIVE, flag_name, values_of, without

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_SHELL = re.compile(r"[();<>|&]+")
_UNKNOWN = re.compile(r"\$(?:[A-Za-z_{(])|`")
_SERVERS = (("vllm", "serve"), ("-m", "vllm.entrypoints.openai.api_server"), ("-m", "vllm.entrypoints.cli.main", "serve"))
_SHORT = {
    "-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-dp": "data-parallel-size", "-q": "quantization",
    "-n": "nnodes", "-r": "node-rank", "-sc": "speculative-config",
}  # fmt: skip
# A flag of a fork of vLLM, from eugr's mod gpu-mem-util-gb: it overrides gpu-memory-utilization.
_GIB = "gpu-memory-utilization-gb"
_ONE_VALUE = ("model", "host", "port", "api-key", "distributed-executor-backend", "nnodes", "node-rank", "master-addr", "master-port",
              "pipeline-parallel-size", "data-parallel-size", "kv-cache-memory-bytes", _GIB, SPECULATIVE[2:])  # fmt: skip


def _as_is(text: str) -> Any:
    return text


def _number(text: str) -> Any:
    """The value of a number flag: an int for plain digits; a text such as 128K stays, because the key accepts it."""
    return int(text) if re.fullmatch(r"\d+", text) else text


def _share(text: str) -> Any:
    return float(text) if _NUMBER.fullmatch(text) else text


_READERS: Mapping[str, Callable[[str], Any]] = {
    "max_model_len": _number,
    "max_num_seqs": _number,
    "max_num_batched_tokens": _number,
    "gpu_memory_utilization": _share,
}
# Flag -> (key, function that reads its value). Any other flag stays a flag.
_KEYS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    **{key.replace("_", "-"): (key, _READERS.get(key, _as_is)) for key in VALUE_FLAGS},
    "tensor-parallel-size": ("tensor_parallel", _number),
    "tool-call-parser": ("tool_call_parser", _as_is),
}
_SWITCHES = {key.replace("_", "-"): key for key in SWITCHES}
# Flags that the key tool_call_parser sets again.
_IMPLIED = ("enable-auto-tool-choice",)
_WITHOUT_VALUE = ("headless", "enable-ssl-refresh", "enable-auto-tool-choice", *_SWITCHES)
# The flags that sparkd reads instead of passing them on: their abbreviations must be unambiguous.
_READ = ({*_KEYS, *_SWITCHES, *_IMPLIED, *_WITHOUT_VALUE, *_ONE_VALUE, "served-model-name"}) - {_GIB}


@dataclass(slots=True)
class Command:
    """The settings in a command line. notes: one sentence for each part that was left out. divided: whether the ranks form a pipeline or
    copies of the model."""

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
                _set(command, name, value)
        elif (served := _served(rest)) is None:
            command.notes.append(f"the line that begins with {rest[0]!r} is not run: sparkd runs no shell.")
        elif words is not None:
            raise ConfigError("command: two lines of it start an engine, and a recipe is one model: split it.")
        else:
            words = served
            for name, value in assigned:
                _set(command, name, value)
    if words is None:
        raise ConfigError("command: it does not start with `vllm serve`, and sparkd runs vLLM only.")
    read_arguments(words, command)
    return command


def read_arguments(words: Sequence[str], command: Command) -> None:
    """Add the arguments after `vllm serve` to `command`."""
    owned: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not _is_flag(word):
            if command.model is None:
                command.model = word
            else:
                command.notes.append(f"{word[:48]!r} is left out: it belongs to no flag.")
            continue
        spelled, equals, value = word.partition("=")
        beginning, _, inner = spelled.partition(".")
        name = _SHORT.get(beginning) or _in_full(flag_name(word) or "")
        taken = [value] if equals else _values(words, index, name)
        index += 0 if equals else len(taken)
        if name == "model" and taken:
            command.model = taken[0]
        elif name == "served-model-name":
            command.served += taken
        elif name in _IMPLIED:
            continue
        elif name not in _KEYS and list(owned_args(["--seed=0", f"--{name}" if name else word])):
            owned.append(f"--{name}")
            command.divided |= name in ("pipeline-parallel-size", "data-parallel-size") and taken != ["1"]
        elif any(_UNKNOWN.search(each) for each in taken):
            command.notes.append(f"--{name} is left out: its value comes from a shell's variable. Set it on the model.")
        elif name in _KEYS and taken and not inner:
            key, read = _KEYS[name]
            command.settings[key] = read(taken[0])
        elif name in _SWITCHES and not inner:
            command.settings[_SWITCHES[name]] = True
        elif name == "kv-cache-memory-bytes" and taken:
            command.settings["kv_cache"] = {"bytes": amount(taken[0]) or taken[0]}
        elif name == _GIB and taken:
            command.settings["memory_gib"] = _share(taken[0])
        elif name in _READ or beginning in _SHORT:
            command.args += [f"--{name}{'.' if inner else ''}{inner}{'=' + value if equals else ''}", *([] if equals else taken)]
        else:
            command.args += [word] if equals else [word, *taken]
    if owned:
        command.notes.append(f"left out, because sparkd itself sees to it: {', '.join(dict.fromkeys(owned))}.")
    for used, gone in (("memory_gib", "gpu_memory_utilization"), ("kv_cache", "gpu_memory_utilization")):
        if used in command.settings and command.settings.pop(gone, None) is not None:
            command.notes.append(f"{gone} is left out: the command has {used} too, which vLLM uses instead.")
    command.args = _one_speculation(command.args)


def _in_full(name: str) -> str:
    """The full name of an abbreviated flag of _READ; any other name unchanged. No other flag of vLLM is a prefix of one of these. Raises
    ConfigError for an ambiguous abbreviation."""
    if not name or name in _READ:
        return name
    flags = sorted(flag for flag in _READ if flag.startswith(name))
    if len(flags) > 1:
        raise ConfigError(f"command: --{name} may be any of {', '.join(f'--{flag}' for flag in flags[:4])}: write out which.")
    return flags[0] if flags else name


def _one_speculation(args: list[str]) -> list[str]:
    """The arguments with the parts of a draft configuration (`--speculative-config.method mtp`) joined to one flag, as vLLM's parser
    does."""
    parts: dict[str, Any] = {}
    for index, arg in enumerate(args):
        written, equals, value = arg.partition("=")
        if not written.startswith(f"{SPECULATIVE}.") or (not equals and index + 1 == len(args)):
            continue
        *path, last = written.removeprefix(f"{SPECULATIVE}.").split(".")
        inner = parts
        for key in path:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{written} sets a key of a value that is not a map: give {SPECULATIVE} as one.")
        inner[last] = _as_json(value if equals else args[index + 1])
    if not parts:
        return args
    whole = [_as_json(value) for *_, value in values_of(args, SPECULATIVE[2:])]
    if any(not isinstance(each, dict) for each in whole):
        raise ConfigError(f"{SPECULATIVE} is not JSON: correct it.")
    return [*without(args, SPECULATIVE[2:]), SPECULATIVE, json.dumps({**(whole[-1] if whole else {}), **parts})]


def _as_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not _NUMBER.fullmatch(word)


def _values(words: Sequence[str], start: int, name: str) -> list[str]:
    """The values of the flag before `start`: the words up to the next flag, but at most as many as the flag takes."""
    most = 0 if name in _WITHOUT_VALUE else 1 if name in _KEYS or name in _ONE_VALUE else len(words)
    values: list[str] = []
    for word in words[start : start + most]:
        if _is_flag(word):
            break
        values.append(word)
    return values


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
    for server in _SERVERS:
        for start in range(min(2, len(words))):
            if tuple(word.rpartition("/")[2] for word in words[start : start + len(server)]) == server:
                return words[start + len(server) :]
    return None


def _set(command: Command, name: str, value: str) -> None:
    if _UNKNOWN.search(value):
        command.notes.append(f"{name} is left out: its value comes from a shell's variable. Set it in the model's 'env:'.")
    else:
        command.env[name] = value


def as_argument(value: Any) -> str:
    """A default's value in the flag's spelling."""
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
