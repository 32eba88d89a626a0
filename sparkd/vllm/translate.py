"""Writes an entry's flags and variables as the supported releases of vLLM read them, or says why there is no such flag."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sparkd.vllm.flag_note import FlagNote
from sparkd.vllm.flags import (
    DRAFTS,
    LOAD_FORMAT,
    SPECULATIVE,
    Value,
    draft_method,
    json_object,
    parsed,
    speculative_config,
    with_draft,
    words,
)
from sparkd.vllm.releases import ANY, DRAFT_EXPERTS, FLAGS, VARIABLES, Dropped, Release

_RELEASE = re.compile(r"v?(\d{1,3})\.(\d{1,4})(?:[.a-z+-]|$)")
_OFF = ("0", "false", "False")


@dataclass(frozen=True, slots=True)
class Translation:
    """Arguments and variables as vLLM reads them. notes: one sentence for each change. refused: one for each that has no match."""

    args: tuple[str, ...]
    env: Mapping[str, str]
    notes: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


def release_of(version: str | None) -> Release | None:
    """`0.32.0+cpu`, `0.18.1rc1` -> (0, 32), (0, 18); None for what is no version, such as `unknown`."""
    match = _RELEASE.match(version or "")
    return (int(match[1]), int(match[2])) if match else None


def translated(args: Sequence[str], env: Mapping[str, str], _release: object = None) -> Translation:
    """`args` and `env` for any supported release.

    A flag that is given already is never contradicted: the variable that it replaced is then only taken away.
    """
    if not any(row.name in env for row in VARIABLES) and parsed(args).keys().isdisjoint(row.name for row in FLAGS):
        return Translation(tuple(args), dict(env))
    work = _Work(dict(parsed(args)), dict(env))
    for row in FLAGS:
        if row.name in work.flags:
            work.become(row, f"--{row.name}", str(work.flags.pop(row.name)))
    work.experts_of_draft()
    for row in VARIABLES:
        if row.name in work.env:
            value = work.env.pop(row.name).strip().lower()
            work.become(row, row.name, {"true": "1", "false": "0"}.get(value, value))
    return Translation(tuple(words(work.flags)), work.env, tuple(work.notes), tuple(work.refused))


@dataclass(slots=True)
class _Work:
    flags: dict[str, Value]
    env: dict[str, str]
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def become(self, row: Dropped, shown: str, value: str) -> None:
        flags = row.becomes.get(value, row.becomes.get(ANY))
        if flags is None:
            message = f"vLLM does not know it any more, and no flag replaces its value. {row.cure}."
            self.refused.append(FlagNote(row.name, message, shown))
            return
        said = [f"--{name} is given already" if name in self.flags else f"--{name} {text} says it now" for name, text in flags.items()]
        self.flags |= {name: text for name, text in flags.items() if name not in self.flags}
        self.notes.append(FlagNote(row.name, f"{row.why}{'; ' + ', '.join(said) if said else ''}.", f"{shown} is left out"))

    def experts_of_draft(self) -> None:
        """The backend of an MTP draft's experts moves into the configuration of drafts."""
        text = self.flags.get(DRAFTS)
        config = json_object(text) if isinstance(text, str) else None
        if config is not None and str(config.get("method")).endswith("mtp") and self.env.get(DRAFT_EXPERTS) in _OFF:
            del self.env[DRAFT_EXPERTS]
            self.flags[DRAFTS] = json.dumps({"moe_backend": "triton", **config})
            reason = f"vLLM does not read it any more; moe_backend of {SPECULATIVE} says it now."
            self.notes.append(FlagNote(DRAFT_EXPERTS, reason, f"{DRAFT_EXPERTS} is left out"))


__all__ = ["LOAD_FORMAT", "PER_BATCH", "SPECULATIVE", "draft_method", "speculative_config", "with_draft"]
PER_BATCH = "num_speculative_tokens_per_batch_size"


def schedule(tokens: int, limit: int) -> list[list[int]]:
    """`tokens` for each step up to batches of limit - 1, none from limit on: the last range goes on (v1/spec_decode/dynamic/utils.py)."""
    return [[1, limit - 1, tokens], [limit, limit, 0]] if limit > 1 else [[1, 1, 0]]


def flag_name(arg: str) -> str | None:
    """`--moe_backend=x` -> moe-backend; None for what is no long flag."""
    return arg[2:].partition("=")[0].replace("_", "-") if arg.startswith("--") and len(arg) > 2 else None


def values_of(args: Sequence[str], name: str) -> Iterator[tuple[int, int, str]]:
    """(first, last, value) of every `--name value` and `--name=value`: the indices of its arguments."""
    for index, arg in enumerate(args):
        if flag_name(arg) == name:
            _, equals, value = arg.partition("=")
            if equals:
                yield index, index, value
            elif index + 1 < len(args):
                yield index, index + 1, args[index + 1]


def without(args: Sequence[str], name: str) -> list[str]:
    """`args` without `--name` and its value."""
    gone = {index for first, last, _ in values_of(args, name) for index in (first, last)}
    return [arg for index, arg in enumerate(args) if index not in gone]


def without_any(args: Iterable[str], names: Collection[str]) -> list[str]:
    """`args` without the flags of these names."""
    return words({name: value for name, value in parsed([*args]).items() if name not in names})
