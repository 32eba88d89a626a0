"""Owns the translation of flags and variables into what one release of vLLM understands, or the reason why it cannot. Never runs vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from sparkd.vllm.flag_note import FlagNote
from sparkd.vllm.releases import (
    ADDED,
    ANY,
    DFLASH_SINCE,
    DISABLE_BY_BATCH_GONE,
    DRAFT_EXPERTS,
    DRAFT_EXPERTS_GONE,
    FLAGS,
    NEVER,
    PER_BATCH_SINCE,
    VARIABLES,
    Dropped,
    Release,
)

SPECULATIVE = "--speculative-config"
# The loader that our plugin registers in vLLM (workers/plugin.py).
LOAD_FORMAT = "spark_stream"
PER_BATCH = "num_speculative_tokens_per_batch_size"
_RELEASE = re.compile(r"v?(\d{1,3})\.(\d{1,4})(?:[.a-z+-]|$)")
_WORD = re.compile(r"[a-z0-9_.,-]{1,64}")
_DISABLE_BY_BATCH = "speculative-disable-by-batch-size"
_OFF = ("0", "false", "False")


@dataclass(frozen=True, slots=True)
class Translation:
    """Arguments and variables as the release wants them. notes: one sentence for each change. refused: one for each that has no match."""

    args: tuple[str, ...]
    env: Mapping[str, str]
    notes: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


def release_of(version: str | None) -> Release | None:
    """`0.32.0+cpu`, `0.18.1rc1` -> (0, 32), (0, 18); None for what is no version, such as `unknown`."""
    match = _RELEASE.match(version or "")
    return (int(match[1]), int(match[2])) if match else None


def translated(args: Sequence[str], env: Mapping[str, str], release: Release | None) -> Translation:
    """`args` and `env` for `release`; as they are where it is not known.

    A flag that is given already is never contradicted: the variable that it replaced is then only taken away.
    """
    if release is None:
        return Translation(tuple(args), dict(env))
    work = _Work(list(args), dict(env), release)
    work.flags()
    work.speculation()
    work.variables()
    work.newer()
    return Translation(tuple(work.args), work.env, tuple(work.notes), tuple(work.refused))


@lru_cache(maxsize=1024)
def flag_name(arg: str) -> str | None:
    """`--moe_backend=x` -> moe-backend; None for what is no long flag. The inner key of `--config.key` is left out."""
    return arg[2:].partition("=")[0].partition(".")[0].replace("_", "-") if arg.startswith("--") and len(arg) > 2 else None


def values_of(args: Sequence[str], name: str) -> Iterator[tuple[int, int, str]]:
    """(first, last, value) of every `--name value` and `--name=value`: the indices of its arguments."""
    for index, arg in enumerate(args):
        if flag_name(arg) == name and "." not in arg.partition("=")[0]:
            _, equals, value = arg.partition("=")
            if equals:
                yield index, index, value
            elif index + 1 < len(args):
                yield index, index + 1, args[index + 1]


def without(args: Sequence[str], name: str) -> list[str]:
    """`args` without `--name` and its value, and without each `--name.key` and its."""
    gone = {index for first, last, _ in values_of(args, name) for index in (first, last)}
    for index, arg in enumerate(args):
        written, equals, _ = arg.partition("=")
        if flag_name(arg) == name and "." in written:
            gone |= {index} if equals else {index, index + 1}
    return [arg for index, arg in enumerate(args) if index not in gone]


def speculative_config(args: Sequence[str]) -> Mapping[str, Any] | None:
    """vLLM's configuration of drafts among a model's flags, the last one; None where there is none, or it is no plain JSON."""
    found = [value for _, _, value in values_of(args, SPECULATIVE[2:])]
    return _mapping(found[-1]) if found else None


def with_draft(args: Sequence[str], model: str) -> list[str]:
    """`args` with that folder as the model in their configuration of drafts. A folder has no revisions."""
    config = {key: value for key, value in (speculative_config(args) or {}).items() if key != "revision"}
    return [*without(args, SPECULATIVE[2:]), SPECULATIVE, json.dumps({**config, "model": model})]


def draft_method(config: Mapping[str, Any]) -> str:
    """The method by vLLM's rules: without one, an n-gram draft may be named as a model; each family's own name of mtp means mtp."""
    method = config.get("method")
    if method is None:
        return "ngram" if config.get("model") in ("ngram", "[ngram]") else "draft_model"
    return "mtp" if str(method).endswith("_mtp") else str(method)


def without_any(args: Iterable[str], names: Collection[str]) -> list[str]:
    """`args` without the flags of these names, switches too, and what stands behind each: up to the next flag, which may be a short one."""
    kept: list[str] = []
    dropping = False
    for arg in args:
        if (name := flag_name(arg)) is not None:
            dropping = name in names
        elif arg[:1] == "-" and arg[1:2].isalpha():
            dropping = False
        if not dropping:
            kept.append(arg)
    return kept


@dataclass(slots=True)
class _Work:
    args: list[str]
    env: dict[str, str]
    release: Release
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "vLLM {}.{}".format(*self.release)

    def variables(self) -> None:
        for row in VARIABLES:
            if row.name in self.env and self.release >= row.gone:
                value = self.env.pop(row.name).strip().lower()
                self._become(row, row.name, {"true": "1", "false": "0"}.get(value, value))

    def flags(self) -> None:
        rows = {row.name: row for row in FLAGS if self.release >= row.gone}
        kept: list[str] = []
        found: list[tuple[Dropped, str]] = []
        skip = False
        for index, arg in enumerate(self.args):
            row = rows.get(flag_name(arg) or "")
            if skip:
                skip = False
            elif row is None:
                kept.append(arg)
            else:
                _, equals, value = arg.partition("=")
                following = self.args[index + 1] if index + 1 < len(self.args) else ""
                if not row.switch and not equals and not following.startswith("--"):
                    value, skip = following, True
                found.append((row, value.lower()))
        self.args = kept
        for row, value in found:
            self._become(row, f"--{row.name}", value)

    def newer(self) -> None:
        for row in ADDED:
            if self.release < row.since and any(flag_name(arg) == row.name for arg in self.args):
                self.refused.append(FlagNote(row.name, f"{self.name} does not have it yet. {row.cure}."))

    def speculation(self) -> None:
        """The batch limit, and what the draft's experts run on, move into the configuration; DFlash needs its release."""
        limits = [int(value) for _, _, value in values_of(self.args, _DISABLE_BY_BATCH) if value.isdigit()]
        if limits and self.release >= DISABLE_BY_BATCH_GONE:
            self.args = without(self.args, _DISABLE_BY_BATCH)
        for first, last, text in reversed(list(values_of(self.args, SPECULATIVE[2:]))):
            config = _mapping(text)
            if config is None:
                continue
            limit = config.pop("disable_by_batch_size", None) or (limits[0] if limits else None)
            tokens = config.get("num_speculative_tokens")
            if limit and isinstance(limit, int) and isinstance(tokens, int) and PER_BATCH not in config:
                config[PER_BATCH] = schedule(tokens, limit)
                self.notes.append(f"speculation ends at a batch of {limit} by {PER_BATCH}: {self.name} reads nothing else.")
                limits = []
            if self.release >= DRAFT_EXPERTS_GONE and str(config.get("method")).endswith("mtp") and self.env.get(DRAFT_EXPERTS) in _OFF:
                del self.env[DRAFT_EXPERTS]
                config.setdefault("moe_backend", "triton")
                reason = f"{self.name} does not read it; moe_backend of {SPECULATIVE} says it now."
                self.notes.append(FlagNote(DRAFT_EXPERTS, reason, f"{DRAFT_EXPERTS} is left out"))
            if PER_BATCH in config and self.release < PER_BATCH_SINCE:
                del config[PER_BATCH]
                self.notes.append(f"{PER_BATCH} is left out: {self.name} does not have it, so it never switches speculation off.")
            if config.get("method") == "dflash" and self.release < DFLASH_SINCE:
                self.refused.append(f"speculative decoding with DFlash: {self.name} does not have it. Use vLLM 0.21 or newer.")
            made = json.dumps(config)
            self.args[first : last + 1] = [SPECULATIVE, made] if config != _mapping(text) else self.args[first : last + 1]
        if limits and self.release >= DISABLE_BY_BATCH_GONE:
            self.notes.append(f"--{_DISABLE_BY_BATCH} is left out: {self.name} does not have it, and no number of tokens goes with it.")

    def _become(self, row: Dropped, shown: str, value: str) -> None:
        pattern = row.becomes.get(value, row.becomes.get(ANY))
        if pattern is None or (any("{}" in part for part in pattern) and not _WORD.fullmatch(value)):
            whose = "no release of vLLM knows it" if row.gone == NEVER else f"{self.name} does not know it any more"
            self.refused.append(FlagNote(row.name, f"{whose}, and no other flag replaces its value. {row.cure or 'Remove it'}.", shown))
            return
        said: list[str] = []
        flags = [part.replace("{}", value) for part in pattern]
        for flag, following in zip(flags, [*flags[1:], ""], strict=False):
            if not flag.startswith("--"):
                continue
            pair = [flag] if "=" in flag or not following or following.startswith("--") else [flag, following]
            if any(flag_name(arg) == flag_name(flag) for arg in self.args):
                said.append(f"{flag.partition('=')[0]} is given already")
            else:
                self.args += pair
                said.append(f"{' '.join(pair)} says it now")
        because = row.why or ("no release of vLLM reads it" if row.gone == NEVER else f"{self.name} does not read it")
        self.notes.append(FlagNote(row.name, f"{because}{'; ' + ', '.join(said) if said else ''}.", f"{shown} is left out"))


def schedule(tokens: int, limit: int) -> list[list[int]]:
    """`tokens` for each step up to batches of limit - 1, none from limit on: the last range goes on (v1/spec_decode/dynamic/utils.py)."""
    return [[1, limit - 1, tokens], [limit, limit, 0]] if limit > 1 else [[1, 1, 0]]


def _mapping(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
