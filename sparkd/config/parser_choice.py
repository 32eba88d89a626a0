"""Chooses the parsers of one entry by its model's configuration and the chat templates that vLLM takes. Keys and flags of the entry win."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkd.checkpoint import CONFIG, Folder
from sparkd.checkpoint.source import folder_of, name_of
from sparkd.config.hub_check import Remote, looked_at
from sparkd.config.model import ModelConfig
from sparkd.errors import CheckpointError
from sparkd.vllm.flags import parsed, value_of
from sparkd.vllm.parsers import FAMILY, OFF, TEMPLATE, Parsers, chosen, rules_of
from workers.host import regular_file

TEMPLATE_FILE, PROCESSOR, TOKENIZER = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"
TOOL_USE = "additional_chat_templates/tool_use.jinja"
# All that is read of a model here.
FILES = (CONFIG, TOOL_USE, TEMPLATE_FILE, PROCESSOR, TOKENIZER)
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
# A model's files on this node, or as its hub showed them.
Files = Folder | Remote
_TEMPLATE_FLAG = "chat-template"


def expected(spec: ModelConfig, env: Mapping[str, str]) -> Parsers | None:
    """The parsers that the model's engine will have; None where nothing tells its tool parser before it starts. Blocks.

    Files that lack a part, or that a silent hub does not give now, do not tell that there is none.
    """
    parsers = with_parsers(spec, env)[1]
    if parsers.tool or spec.tool_call_parser == OFF:
        return parsers
    files = _files(spec, env)
    return parsers if parsers.nearest and files is not None and _are_read(files) else None


def explained(spec: ModelConfig, env: Mapping[str, str], recipe: Mapping[str, Any]) -> dict[str, dict[str, str | None]]:
    """`tool` and `reasoning`, each with the parser's `name`, None for none, and what decides it, `from`: ENTRY, RECIPE, FAMILY or TEMPLATE;
    UNREAD where the model's files will, and None where they tell nothing. recipe: the keys that the entry's recipe sets. Blocks."""
    parsers = with_parsers(spec, env)[1]
    files = _files(spec, env)
    decided_by: tuple[str | None, ...] = (UNREAD, UNREAD)
    if files is not None:
        rules = rules_of(_config(spec, files), *_templates(spec, files))
        decided_by = tuple(None if rule is None else rule.origin for rule in rules)

    def row(key: str, name: str | None, origin: str | None) -> dict[str, str | None]:
        if (own := getattr(spec, key)) is None:
            return {"name": name, "from": origin if name is not None or origin == UNREAD else None}
        return {"name": name, "from": RECIPE if recipe.get(key) == own else ENTRY}

    return {
        "tool": row("tool_call_parser", parsers.tool, decided_by[0]),
        "reasoning": row("reasoning_parser", parsers.reasoning, decided_by[1]),
    }


def in_words(rows: Mapping[str, Mapping[str, str | None]]) -> str:
    """The rows of `explained` on one line."""
    return ", ".join(f"{kind} {row['name'] or OFF} ({_WHENCE[row['from']]})" for kind, row in rows.items())


def with_parsers(spec: ModelConfig, env: Mapping[str, str]) -> tuple[ModelConfig, Parsers]:
    """The entry with both parsers decided, `none` for none, and what its engine will have. Nothing is chosen for a model whose files are
    neither here nor were looked at on its hub (sparkd.config.hub_check). An entry's keys win. Blocks."""
    files = _files(spec, env)
    choice = Parsers() if files is None else chosen(_config(spec, files), *_templates(spec, files))
    tool = spec.tool_call_parser or choice.tool or OFF
    # vLLM merges a JSON flag with its own parser in it.
    by_flag = "structured-outputs-config" in parsed(spec.extra_args)
    reasoning = spec.reasoning_parser or (None if by_flag else choice.reasoning or OFF)
    decided = spec.model_copy(update={"tool_call_parser": tool, "reasoning_parser": reasoning})
    tool_in_effect, reasoning_in_effect = (None if name == OFF else name for name in (tool, reasoning))
    return decided, Parsers(tool_in_effect, reasoning_in_effect, None if tool_in_effect else choice.tool or choice.nearest)


def _here(spec: ModelConfig, env: Mapping[str, str]) -> Files | None:
    folder = folder_of(spec.model, spec.revision, env)
    try:
        return None if folder is None else Folder(folder)
    except CheckpointError:
        return None


def _files(spec: ModelConfig, env: Mapping[str, str]) -> Files | None:
    """On this node, else as the hub showed them."""
    return _here(spec, env) or looked_at(spec, env)


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


def _templates(spec: ModelConfig, files: Files) -> tuple[str | None, str | None]:
    """The templates by which vLLM renders a chat with tools and one without (vllm/renderers/hf.py, resolve_chat_template).

    With tools vLLM takes the tokenizer's, in which a file overrides tokenizer_config.json (transformers, tokenization_utils_base.py), and
    among several the one named `tool_use`. Without tools a processor's own template comes first.
    """
    if (given := value_of(spec.extra_args, _TEMPLATE_FLAG)) is not None:
        return (template := _given(given)), template
    named = _named(_json(files, TOKENIZER).get("chat_template"))
    from_files = {"default": _text(files, TEMPLATE_FILE), "tool_use": _text(files, TOOL_USE)}
    named = from_files if any(from_files.values()) else named
    if _MISTRAL in files.names and not any(named.values()):
        named = {"default": _MISTRAL_FORMAT}
    plain = named.get("default")
    processor = _json(files, PROCESSOR).get("chat_template") if TEMPLATE_FILE not in files.names else None
    return named.get("tool_use") or plain, processor if isinstance(processor, str) else plain


def _named(template: Any) -> dict[str, str | None]:
    """The templates of a tokenizer by name: one, a list of them with their names, or a map."""
    if isinstance(template, list):
        template = {str(part.get("name")): part.get("template") for part in template if isinstance(part, Mapping)}
    elif not isinstance(template, Mapping):
        template = {"default": template}
    return {str(name): text for name, text in template.items() if isinstance(text, str)}


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
    # A folder's names are those of its own files and folders, a hub's have the folders before them.
    if name not in files.names and name.partition("/")[0] not in files.names:
        return None
    try:
        return files.content(name).decode("utf-8", "replace")
    except CheckpointError:
        return None
