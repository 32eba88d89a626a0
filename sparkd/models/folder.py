"""Owns whether a folder on this node can be a model's at all, by a look at the names in it. Never reads a file."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping

from workers.host.hub_cache import hub_cache

# The files that vLLM takes a model's shape from: transformers' file or Mistral's.
_CONFIGS = ("config.json", "params.json")
_CURE = "check the path in `model`, or use a hub id (owner/name)"


def places_of(sources: Iterable[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Where models lie: beside those of the configuration file, whose `sources` these are, and in the hub's cache."""
    parents = {os.path.dirname(os.path.abspath(source)) for source in sources if source.startswith("/")} - {"/"}
    return (*sorted(parents), os.path.abspath(hub_cache(environ)))


def unusable(folder: str, *, vllm: bool, places: Collection[str] | None = None) -> str | None:
    """Why not, as a sentence; None where it can be, or where `folder` is a hub id. vllm: what another module reads there is its own affair.

    places: of `places_of`, None for anywhere. Beyond them each reason is told in the same words, because which paths there are is no
    caller's business. Blocks.
    """
    why = _unusable(folder, vllm=vllm)
    if why is None or places is None or any(os.path.abspath(folder).startswith(f"{place}/") for place in places):
        return why
    return f"There is no model at {folder} that sparkd can read: {_CURE}, and let the user that sparkd runs as read it."


def _unusable(folder: str, *, vllm: bool) -> str | None:
    if not folder.startswith("/"):
        return None
    if os.path.isfile(folder):
        return f"{folder} is a file, and the folder of a model is expected: {_CURE}."
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
