"""Owns whether a folder on this node can be a model's at all, by a look at the names in it. Never reads a file."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping

from sparkd.errors import ModelUnusable
from workers.host.hub_cache import hub_cache

# The files that vLLM takes a model's shape from: transformers' file or Mistral's.
_CONFIGS = ("config.json", "params.json")
_CURE = "check the path in `model`, or use a hub id (owner/name)"


def places_of(sources: Iterable[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Where models lie: beside those of the configuration file, whose `sources` these are, and in the hub's cache."""
    parents = {os.path.dirname(os.path.abspath(source)) for source in sources if source.startswith("/")} - {"/"}
    return (*sorted(parents), os.path.abspath(hub_cache(environ)))


def unusable(folder: str, *, vllm: bool, places: Collection[str] | None = None) -> ModelUnusable | None:
    """The error to raise, with a message for clients that does not say where the folder is; None where it can be a model's, or where
    `folder` is a hub id. vllm: what another module reads there is its own affair.

    places: the folders of `places_of`, None for anywhere. Outside of them every fault has the same message, so that a caller cannot probe
    which paths exist. Blocks.
    """
    fault = _fault(folder, vllm=vllm)
    if fault is None:
        return None
    if places is None or any(os.path.abspath(folder).startswith(f"{place}/") for place in places):
        return ModelUnusable(f"The folder {folder} {fault}", client_message=f"Its folder {fault}")
    cure = f"{_CURE}, and let the user that sparkd runs as read it."
    message = f"There is no model at {folder} that sparkd can read: {cure}"
    return ModelUnusable(message, client_message=f"There is no model there that sparkd can read: {cure}")


def _fault(folder: str, *, vllm: bool) -> str | None:
    """The fault of a folder, as the rest of a sentence that begins with its path; None where it can be used."""
    if not folder.startswith("/"):
        return None
    if os.path.isfile(folder):
        return f"is a file: {_CURE}."
    if not os.path.isdir(folder):
        return f"is not on this node: {_CURE}."
    try:
        names = os.listdir(folder)
    except OSError as error:
        return f"cannot be read ({error.strerror}): let the user that sparkd runs as read it."
    if not vllm or holds_model(names):
        return None
    what = f"has neither {' nor '.join(_CONFIGS)} in it" if names else "is empty"
    return f"{what}, so it holds no model: {_CURE}."


def holds_model(names: Iterable[str]) -> bool:
    """Whether vLLM can take a model's shape from one of these files."""
    return any(name in _CONFIGS or name.endswith(".gguf") for name in names)
