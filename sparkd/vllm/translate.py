"""Writes an entry's flags and variables as the supported releases of vLLM read them, or says why there is no such flag."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sparkd.vllm.flag_note import FlagNote
from sparkd.vllm.flags import DRAFTS, SPECULATIVE, Value, json_object, parsed, words
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


def translated(args: Sequence[str], env: Mapping[str, str]) -> Translation:
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
