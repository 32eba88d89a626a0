"""Owns the parsers, formats and drafts that a command line names and the installed vLLM does not have: read from its files, without a
child. Flags it has not are vllm_known's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sparkd.checkpoint.header import shown
from sparkd.nearest import nearest
from sparkd.vllm.arg_check import ANOTHER_PARSER, among
from sparkd.vllm.flag_note import FlagNote
from sparkd.vllm.installed import drafts_of, formats_of, parsers_of
from sparkd.vllm.translate import LOAD_FORMAT, SPECULATIVE, flag_name, speculative_config, values_of


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


def unknown_formats(args: Sequence[str], env: Mapping[str, str], runtime: Path | None) -> Iterator[FlagNote]:
    """A sentence for each value of --quantization and of --load-format that the vLLM of this environment does not have. None where plugins
    may bring more."""
    known = formats_of(runtime)
    if known is None or any(name in env for name in ANOTHER_PARSER):
        return
    for flag, names in zip(("quantization", "load-format"), (known[0], known[1] | {LOAD_FORMAT}), strict=True):
        given = [value for _, _, value in values_of(args, flag)]
        if given and given[-1] not in names:
            yield FlagNote(flag, f"this vLLM has no {shown(given[-1])}. {among(given[-1], sorted(names))}")


def unknown_drafts(args: Sequence[str], env: Mapping[str, str], runtime: Path | None) -> Iterator[FlagNote]:
    """A sentence for the method and for each key of --speculative-config that the vLLM of this environment does not have; its class
    refuses every other (config/speculative.py)."""
    known = drafts_of(runtime)
    config = speculative_config(args)
    if known is None or config is None or any(name in env for name in ANOTHER_PARSER):
        return
    methods, keys = known
    for key in config:
        if key.replace("-", "_") not in keys:
            yield FlagNote(SPECULATIVE[2:], f"this vLLM has no key {shown(key)} there. {among(key, sorted(keys))}")
    method = config.get("method")
    if method is not None and method not in methods:
        yield FlagNote(SPECULATIVE[2:], f"this vLLM has no method {shown(str(method))}. {among(str(method), sorted(methods))}")
