"""Owns the parsers of tool calls and of reasoning that a command line names and the installed vLLM does not have: read from its files,
without a child."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sparkd.checkpoint.foreign_json import shown
from sparkd.nearest import nearest
from sparkd.vllm.arg_check import ANOTHER_PARSER
from sparkd.vllm.flag_note import FlagNote
from sparkd.vllm.installed import parsers_of
from sparkd.vllm.translate import flag_name, values_of


def unknown_parsers(args: Sequence[str], env: Mapping[str, str], runtime: Path | None) -> Iterator[FlagNote]:
    """A note for each parser of tool calls or of reasoning that this runtime's vLLM lacks: its start would fail. None where plugins may add
    parsers, or where the parsers of the vLLM are unknown."""
    known = parsers_of(runtime)
    if known is None or any(name in env for name in ANOTHER_PARSER) or any("parser-plugin" in (flag_name(arg) or "") for arg in args):
        return
    for flag, names in zip(("tool-call-parser", "reasoning-parser"), known, strict=True):
        found = [value for _, _, value in values_of(args, flag)]
        if found and found[-1] not in names:
            near = nearest(found[-1], sorted(names))
            cure = f"Did you mean {near}?" if near else f"It has {', '.join(sorted(names))}."
            yield FlagNote(flag, f"this vLLM has no parser {shown(found[-1])}. {cure}", flag.replace("-", "_"))
