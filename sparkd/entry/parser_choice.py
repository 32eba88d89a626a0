"""Owns choosing the parsers of one entry: reads its configuration and chat template, and keeps to what the vLLM of its runtime has. Never
overrides what the entry says.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from sparkd.checkpoint import CONFIG, Folder
from sparkd.entry.hub_check import looked_at
from sparkd.errors import CheckpointError
from sparkd.models.source import folder_of, name_of
from sparkd.schema.model import ModelConfig
from sparkd.vllm.installed import parsers_of
from sparkd.vllm.parsers import FAMILY, OFF, TEMPLATE, Parsers, chosen, origins
from sparkd.vllm.translate import flag_name, values_of
from workers.host import regular_file

TEMPLATE_FILE, PROCESSOR, TOKENIZER = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"
# All that is read of a model here.
FILES = (CONFIG, TEMPLATE_FILE, PROCESSOR, TOKENIZER)
# Mistral's own tokenizer renders tools without a template, in one format.
_MISTRAL, _MISTRAL_FORMAT = "tekken.json", "tools [TOOL_CALLS]"
# These decide a parser, too, beside the family and the template.
ENTRY, RECIPE, UNREAD = "entry", "recipe", "unread"
_WHENCE: Mapping[str | None, str] = {
    ENTRY: "its entry",
    RECIPE: "its recipe",
    FAMILY: "its family",
    TEMPLATE: "its chat template",
    UNREAD: "its files are not on this node",
    None: "none is known for it",
}
# No template is nearly as large.
_MOST_BYTES = 4 << 20
_TOOL_FLAG, _REASONING_FLAG, _TEMPLATE_FLAG = "tool-call-parser", "reasoning-parser", "chat-template"


class Files(Protocol):
    """A model's files. content: raises CheckpointError."""

    @property
    def names(self) -> Collection[str]: ...
    def content(self, name: str) -> bytes: ...


def expected(spec: ModelConfig, env: Mapping[str, str], runtime: Path | None) -> Parsers | None:
    """The parsers that the model's engine will have; None where nothing tells its tool parser before it starts. Blocks.

    Files that lack a part, or that a silent hub does not give now, do not tell that there is none.
    """
    parsers = with_parsers(spec, env, runtime)[1]
    if parsers.tool or spec.tool_call_parser == OFF:
        return parsers
    files = _files(spec, env)
    return parsers if parsers.nearest and files is not None and _are_read(files) else None


def explained(
    spec: ModelConfig, env: Mapping[str, str], runtime: Path | None, recipe: Mapping[str, Any]
) -> dict[str, dict[str, str | None]]:
    """`tool` and `reasoning`, each with the parser's `name`, None for none, and what decides it, `from`: ENTRY, RECIPE, FAMILY or TEMPLATE;
    UNREAD where the model's files will, and None where they tell nothing. recipe: the keys that the entry's recipe sets. Blocks."""
    parsers = with_parsers(spec, env, runtime)[1]
    files = _files(spec, env)
    decided_by: tuple[str | None, str | None] = (UNREAD, UNREAD)
    if files is not None:
        decided_by = origins(_config(spec, files), _template(spec, files), (parsers_of(runtime) or (None, None))[1])

    def row(key: str, flag: str, name: str | None, origin: str | None) -> dict[str, str | None]:
        own = getattr(spec, key)
        if own is None and not any(values_of(spec.extra_args, flag)):
            return {"name": name, "from": origin if name is not None or origin == UNREAD else None}
        return {"name": name, "from": RECIPE if own is not None and recipe.get(key) == own else ENTRY}

    return {
        "tool": row("tool_call_parser", _TOOL_FLAG, parsers.tool, decided_by[0]),
        "reasoning": row("reasoning_parser", _REASONING_FLAG, parsers.reasoning, decided_by[1]),
    }


def in_words(rows: Mapping[str, Mapping[str, str | None]]) -> str:
    """The rows of `explained` on one line."""
    return ", ".join(f"{kind} {row['name'] or OFF} ({_WHENCE[row['from']]})" for kind, row in rows.items())


def with_parsers(spec: ModelConfig, env: Mapping[str, str], runtime: Path | None) -> tuple[ModelConfig, Parsers]:
    """The entry with both parsers decided, `none` for none, and what its engine will have. Nothing is chosen for a model whose files are
    neither here nor were looked at on its hub (sparkd.entry.hub_check). An entry's keys and flags win. Blocks."""
    files = _files(spec, env)
    chosen_parsers = Parsers() if files is None else _read(spec, files, runtime)
    own = {name: list(values_of(spec.extra_args, name)) for name in (_TOOL_FLAG, _REASONING_FLAG)}
    # A flag that the entry writes out is the whole decision: the key stays as it is.
    tool = spec.tool_call_parser or (None if own[_TOOL_FLAG] else chosen_parsers.tool or OFF)
    reasoning = spec.reasoning_parser or (None if own[_REASONING_FLAG] or _speaks_of_reasoning(spec) else chosen_parsers.reasoning or OFF)
    decided = spec.model_copy(update={"tool_call_parser": tool, "reasoning_parser": reasoning})
    in_effect = [_in_effect(name, own[flag]) for name, flag in ((tool, _TOOL_FLAG), (reasoning, _REASONING_FLAG))]
    return decided, Parsers(in_effect[0], in_effect[1], None if in_effect[0] else chosen_parsers.tool or chosen_parsers.nearest)


def _in_effect(name: str | None, flags: list[tuple[int, int, str]]) -> str | None:
    """The parser in effect: vLLM takes the last flag."""
    last = flags[-1][2] if flags else name
    return None if last == OFF else last


def _speaks_of_reasoning(spec: ModelConfig) -> bool:
    """Whether extra_args may set the reasoning parser as a part of a JSON flag, which vLLM merges with its own."""
    return any(flag_name(arg) == "structured-outputs-config" for arg in spec.extra_args)


def _here(spec: ModelConfig, env: Mapping[str, str]) -> Files | None:
    folder = folder_of(spec.model, spec.revision, env)
    try:
        return None if folder is None else Folder(folder)
    except CheckpointError:
        return None


def _files(spec: ModelConfig, env: Mapping[str, str]) -> Files | None:
    """On this node, else as the hub showed them."""
    return _here(spec, env) or looked_at(spec, env)


def _read(spec: ModelConfig, files: Files, runtime: Path | None) -> Parsers:
    tools, reasonings = parsers_of(runtime) or (None, None)
    return chosen(_config(spec, files), _template(spec, files), tools, reasonings)


def _are_read(files: Files) -> bool:
    """Whether a file is there that a template may be in, and all can be read."""
    named = [name for name in FILES if name in files.names]
    has_template = len(named) > 1 or _MISTRAL in files.names
    return has_template and all(_text(files, name) is not None for name in named)


def _config(spec: ModelConfig, files: Files) -> Mapping[str, Any]:
    config = _json(files, CONFIG)
    if isinstance(config.get("model_type"), str):
        return config
    return {**config, "model_type": name_of(spec.model).replace("-", "_")}


def _template(spec: ModelConfig, files: Files) -> str | None:
    """The template by which vLLM renders a chat with tools."""
    if values := list(values_of(spec.extra_args, _TEMPLATE_FLAG)):
        return _given(values[-1][2])
    if TEMPLATE_FILE in files.names:
        return _text(files, TEMPLATE_FILE)
    for name in (PROCESSOR, TOKENIZER):
        template = _json(files, name).get("chat_template")
        if isinstance(template, list):
            named = {part.get("name"): part.get("template") for part in template if isinstance(part, Mapping)}
            template = named.get("tool_use") or named.get("default")
        if isinstance(template, str):
            return template
    return _MISTRAL_FORMAT if _MISTRAL in files.names else None


def _given(value: str) -> str | None:
    """The template of a --chat-template value, which is a file or the template itself."""
    path = Path(value)
    try:
        return regular_file.read(path, _MOST_BYTES).decode()
    except (OSError, ValueError):
        pass
    return value if "{" in value else None


def _json(files: Files, name: str) -> Mapping[str, Any]:
    try:
        value = json.loads(_text(files, name) or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _text(files: Files, name: str) -> str | None:
    if name not in files.names:
        return None
    try:
        return files.content(name).decode("utf-8", "replace")
    except CheckpointError:
        return None
