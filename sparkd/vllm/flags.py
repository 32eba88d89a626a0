"""Reads vLLM's command line, whose flags are long and written in full: `--flag value`, `--flag=value`, `--switch`, `--no-switch`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from sparkd.units import multiple

# True for `--switch`, False for `--no-switch`, several texts for a list or a flag that repeats.
Value = str | bool | tuple[str, ...]

# The flag with vLLM's configuration of drafts, and its name.
SPECULATIVE = "--speculative-config"
DRAFTS = SPECULATIVE[2:]
# The loader that sparkd's plugin registers in vLLM (workers/plugin.py).
LOAD_FORMAT = "spark_stream"
# vLLM keeps every value of this flag (entrypoints/launchers/cli_args.py); of any other the last counts.
_REPEATED = ("middleware",)
# The short names of vLLM 0.32's parser (sparkd/vllm/vllm-flags-0.32.0.txt), and -O (vllm/utils/argparse_utils.py).
SHORT: Mapping[str, str] = {
    "-O": "optimization-level", "-ac": "attention-config", "-asc": "api-server-count", "-cc": "compilation-config",
    "-dc": "diffusion-config", "-dcp": "decode-context-parallel-size", "-dp": "data-parallel-size",
    "-dpa": "data-parallel-address", "-dpb": "data-parallel-backend", "-dpe": "data-parallel-external-lb",
    "-dph": "data-parallel-hybrid-lb", "-dpl": "data-parallel-size-local", "-dpm": "data-parallel-multi-port-external-lb",
    "-dpn": "data-parallel-rank", "-dpp": "data-parallel-rpc-port", "-dpr": "data-parallel-start-rank",
    "-ep": "enable-expert-parallel", "-h": "help", "-n": "nnodes", "-pcp": "prefill-context-parallel-size",
    "-pp": "pipeline-parallel-size", "-q": "quantization", "-r": "node-rank", "-sc": DRAFTS, "-tp": "tensor-parallel-size",
}  # fmt: skip
_NAME = re.compile(r"--[A-Za-z0-9]+(?:[-_][A-Za-z0-9]+)*")
# argparse's rule to tell a negative number from a flag.
_NEGATIVE = re.compile(r"-[0-9]+|-[0-9]*\.[0-9]+")
_SHORT_WORD = re.compile(r"(-[A-Za-z]+?)(?:\d.*|[.=].*)?")
_AMOUNT = re.compile(r"(\d{1,18})(\.\d{1,18})?([kKmMgGtT])?")
# vLLM's number for a draft by suffix where no number of tokens is given (suffix_decoding_max_tree_depth).
_SUFFIX_DEPTH = 24


class Flag(NamedTuple):
    """A flag where it stands.

    name: with dashes, without `--` and `no-`; as it is written where that is no flag in full, "" for a value that belongs to no flag.
    place: index of its first word.
    """

    name: str
    value: Value
    place: int


class Draft(NamedTuple):
    """vLLM's configuration of drafts.

    tokens: proposed at a time.
    model: the draft's folder or hub id, None for the model's own layers.
    """

    method: str
    tokens: int
    model: str | None = None
    revision: str | None = None


def flags_in(args: Sequence[str]) -> Iterator[Flag]:
    """Every flag in its order, in one pass."""
    index = 0
    while index < len(args):
        first, (written, equals, text) = index, args[index].partition("=")
        index += 1
        if is_value(args[first]):
            yield Flag("", args[first], first)
            continue
        if not _NAME.fullmatch(written):
            yield Flag(written, text, first)
            continue
        name = written[2:].replace("_", "-")
        while not equals and index < len(args) and is_value(args[index]):
            index += 1
        values = (text,) if equals else tuple(args[first + 1 : index])
        if not values:
            yield Flag(name.removeprefix("no-"), not name.startswith("no-"), first)
        else:
            yield Flag(name, values[0] if len(values) == 1 else values, first)


def parsed(args: Sequence[str]) -> Mapping[str, Value]:
    """The values by name. The last of several counts, as in vLLM. Words that are no flag in full are left out."""
    return _parsed(tuple(args))


@lru_cache(maxsize=256)
def _parsed(args: tuple[str, ...]) -> Mapping[str, Value]:
    flags: dict[str, Value] = {}
    for flag in flags_in(args):
        if flag.name in _REPEATED and isinstance(flag.value, str):
            flags[flag.name] = (*_many(flags.get(flag.name, ())), flag.value)
        elif flag.name and flag.name[0] != "-":
            flags[flag.name] = flag.value
    return flags


def words(flags: Mapping[str, Value]) -> list[str]:
    """The arguments that `parsed` reads as these flags."""
    args: list[str] = []
    for name, value in flags.items():
        if isinstance(value, bool):
            args.append(f"--{name}" if value else f"--no-{name}")
        elif name in _REPEATED or (isinstance(value, str) and not is_value(value)):
            args += [f"--{name}={each}" for each in _many(value)]
        else:
            args += [f"--{name}", *_many(value)]
    return args


def without(args: Sequence[str], *names: str) -> list[str]:
    """`args` without the flags of these names."""
    return words({name: value for name, value in parsed(args).items() if name not in names})


def value_of(args: Sequence[str], name: str) -> str | None:
    """The text of a flag; None without the flag, for a switch and for a list."""
    value = parsed(args).get(name)
    return value if isinstance(value, str) else None


def speculative_config(args: Sequence[str]) -> Mapping[str, Any] | None:
    """vLLM's configuration of drafts; None where there is none, or it is no JSON object."""
    return json_object(value_of(args, DRAFTS) or "")


def with_draft(args: Sequence[str], model: str) -> list[str]:
    """`args` with that folder as the model in their configuration of drafts. A folder has no revisions."""
    config = {key: value for key, value in (speculative_config(args) or {}).items() if key != "revision"}
    return words({**parsed(args), DRAFTS: json.dumps({**config, "model": model})})


def draft_of(config: Mapping[str, Any]) -> Draft:
    """Parse vLLM's configuration of drafts by its rules (config/speculative.py): without a method, an n-gram draft may be named as a model;
    each family's own name of mtp means mtp."""
    method, tokens, model, revision = (config.get(key) for key in ("method", "num_speculative_tokens", "model", "revision"))
    if method is None:
        method = "ngram" if model in ("ngram", "[ngram]") else "draft_model"
    if method == "suffix" and tokens is None:
        tokens = config.get("suffix_decoding_max_tree_depth", _SUFFIX_DEPTH)
    return Draft(
        "mtp" if str(method).endswith("_mtp") else str(method),
        tokens if type(tokens) is int and tokens > 0 else 1,
        model if isinstance(model, str) else None,
        revision if isinstance(revision, str) else None,
    )


def in_full(word: str) -> str | None:
    """The full name behind a word that begins with one dash, without dashes; None where vLLM has no such short name."""
    short = _SHORT_WORD.fullmatch(word)
    return SHORT.get(short[1]) if short is not None else None


def why_not_in_full(flag: Flag) -> str | None:
    """Why this is no flag in full with its values, and what to write; None where it is one. It shows no value."""
    word = flag.name
    if not word:
        return "A value stands behind no flag, so vLLM would read it as the model: set the model by 'model:', or remove it."
    if word == "--":
        return "'--' would turn the arguments after it into model names: remove it."
    if not word.startswith("-"):
        return None
    name, _, key = word.partition(".")
    if name.startswith("--"):
        cure = f"write {name} and one JSON object, {{{json.dumps(key[:24])}: ..}}" if key else "write a flag of vLLM's"
    else:
        cure = f"write --{full}" if (full := in_full(word)) else "write the flag in full, with two dashes"
    return f"{shown(word)} is not a flag in full: {cure}."


def is_value(word: str) -> bool:
    """Whether argparse reads the word as a value and not as a flag."""
    return not word.startswith("-") or _NEGATIVE.fullmatch(word) is not None


def amount(value: str) -> int | None:
    """The number that vLLM reads in `8192`, `8k` (1,000) and `8K` (1,024); None for anything else (human_readable_int)."""
    match = _AMOUNT.fullmatch(value.strip())
    if match is None:
        return None
    digits, fraction, suffix = match.groups()
    if suffix and suffix.islower():
        return int(float(f"{digits}{fraction or ''}") * multiple(suffix))
    return None if fraction else int(digits) * multiple(suffix or "")


def json_object(text: str) -> dict[str, Any] | None:
    """The object in this JSON; None for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def shown(text: str) -> str:
    """A flag in a message; it has no value, which may be a secret."""
    return repr(text if len(text) <= 48 else text[:45] + "...")


def _many(value: Value) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else (str(value),)
