"""Owns whether a folder on this node can be a model's at all, by a look at the names in it. Never reads a file."""

from __future__ import annotations

import os
from collections.abc import Iterable

# What vLLM takes a model's shape from: transformers' file or Mistral's.
_CONFIGS = ("config.json", "params.json")
_CURE = "check the path in `model`, or use a hub id (owner/name)"


def unusable(folder: str, *, vllm: bool) -> str | None:
    """Why not, as a sentence; None where it can be, or where `folder` is a hub id. vllm: what another module reads there is its own affair.
    Blocks."""
    if not folder.startswith("/"):
        return None
    if not os.path.isdir(folder):
        return f"The folder {folder} is not on this node: {_CURE}."
    try:
        names = os.listdir(folder)
    except OSError as error:
        return f"The folder {folder} cannot be read ({error.strerror}): let the user that sparkd runs as read it."
    if not vllm or holds_model(names):
        return None
    what = f"has neither {' nor '.join(_CONFIGS)} in it" if names else "is empty"
    return f"The folder {folder} {what}, so it holds no model: {_CURE}."


def holds_model(names: Iterable[str]) -> bool:
    """Whether vLLM can take a model's shape from one of these files."""
    return any(name in _CONFIGS or name.endswith(".gguf") for name in names)
