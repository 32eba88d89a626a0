"""Whether a folder on this node can be a model's at all, by the names in it, and how that is said."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from sparkd.errors import ConfigError, ModelUnusable
from workers.host.hub_cache import hub_cache

if TYPE_CHECKING:
    from sparkd.config.config import EngineSettings
    from sparkd.config.model import ModelConfig

# The files that vLLM takes a model's shape from: transformers' file or Mistral's.
_CONFIGS = ("config.json", "params.json")
# Any name that a tokenizer of transformers', Mistral's or the model's own code is known to read.
_TOKENIZER = re.compile(r"tokeniz|vocab|merges\.txt|tekken|spiece|sentencepiece|\.tiktoken$|\.model$|\.gguf$")
_TOKENIZER_CURE = "copy them there from where the model came from, or name another folder's by `--tokenizer` in extra_args"
_CURE = "check the path in `model`, or use a hub id (owner/name)"


def places_of(sources: Iterable[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Where models lie: beside those of the configuration file, whose `sources` these are, and in the hub's cache."""
    parents = {os.path.dirname(os.path.abspath(source)) for source in sources if source.startswith("/")} - {"/"}
    return (*sorted(parents), os.path.abspath(hub_cache(environ)))


def unusable(folder: str, *, vllm: bool, places: Collection[str] | None = None, tokenizer: bool = False) -> ModelUnusable | None:
    """The error to raise, with a message for clients that does not say where the folder is; None where it can be a model's, or where
    `folder` is a hub id. Blocks.

    vllm: whether the engine is vLLM; another module reads there what it likes.
    places: the folders of `places_of`, None for anywhere. Outside of them every fault has the same message, so that a caller cannot probe
        which paths exist.
    tokenizer: whether an engine needs one from there.
    """
    fault = _fault(folder, vllm=vllm, tokenizer=tokenizer)
    if fault is None:
        return None
    if places is None or any(os.path.abspath(folder).startswith(f"{place}/") for place in places):
        what, cure = fault
        return ModelUnusable(
            f"The folder {folder} {what}: {cure}.", client_message=f"Its folder {what}: {_CURE if folder in cure else cure}."
        )
    cure = f"{_CURE}, and let the user that sparkd runs as read it."
    message = f"There is no model at {folder} that sparkd can read: {cure}"
    return ModelUnusable(message, client_message=f"There is no model there that sparkd can read: {cure}")


def unusable_of(spec: ModelConfig, engine: EngineSettings, places: Collection[str] | None = None) -> ModelUnusable | None:
    """`unusable` for the folder of an entry, by what its engine reads there. Blocks."""
    return unusable(spec.model, vllm=spec.runs_vllm(engine), places=places, tokenizer=spec.reads_tokenizer)


def refuse_unusable(folder: str, *, vllm: bool) -> None:
    """Raises ConfigError with the message of `unusable`, for a caller who may know which paths exist. Blocks."""
    if fault := unusable(folder, vllm=vllm):
        raise ConfigError(fault.message)


def _fault(folder: str, *, vllm: bool, tokenizer: bool) -> tuple[str, str] | None:
    """The fault of a folder, as the rest of a sentence that begins with its path, and the cure. None where it can be used."""
    if not folder.startswith("/"):
        return None
    if os.path.isfile(folder):
        return "is a file", _CURE
    if not os.path.isdir(folder):
        return "is not on this node", _CURE
    try:
        names = os.listdir(folder)
    except OSError as error:
        return f"cannot be read ({error.strerror})", "let the user that sparkd runs as read it"
    if not vllm:
        return None
    if holds_model(names):
        lacks = tokenizer and not any(_TOKENIZER.search(name.lower()) for name in names)
        return ("has no tokenizer's files in it, such as tokenizer.json", _TOKENIZER_CURE) if lacks else None
    if not names:
        return "is empty, so it holds no model", _CURE
    return f"has neither {' nor '.join(_CONFIGS)} in it, so it holds no model", _meant(folder, names)


def _meant(folder: str, names: Iterable[str]) -> str:
    """The cure for a folder of these names, by the model that it may stand for."""
    if "snapshots" in names:
        return f"name the model by its id, {os.path.basename(folder).removeprefix('models--').replace('--', '/', 1)}"
    if "adapter_config.json" in names:
        return "it is an adapter; serve the model that it was made for, with --enable-lora and --lora-modules in extra_args"
    # None of them is named, because in /tmp it would be another user's scratch folder.
    below = any(os.path.isfile(os.path.join(folder, name, file)) for name in names for file in _CONFIGS)
    return "name the model's own folder, which lies below it" if below else _CURE


def holds_model(names: Iterable[str]) -> bool:
    """Whether vLLM can take a model's shape from one of these files."""
    return any(name in _CONFIGS or name.endswith(".gguf") for name in names)
