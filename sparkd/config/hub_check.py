"""Looks for a model that is not on this machine on its hub, before an engine is started for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, partial

from sparkd.checkpoint.hub import Hub
from sparkd.checkpoint.model_folder import holds_model
from sparkd.checkpoint.source import folder_of
from sparkd.config.model import ModelConfig
from sparkd.errors import CheckpointError, CheckpointUnread, ConfigError, HubUnreachable, ModelUnusable

# An answer counts for so long: a start asks several times, and so does every client that waits.
KEPT_S = 30.0
_TRUE = ("1", "true", "True", "TRUE")


@dataclass(frozen=True, slots=True)
class Remote:
    """A repository's files at one commit. content: reads a small one, once; raises CheckpointError."""

    commit: str
    names: Collection[str]
    content: Callable[[str], bytes]


# A repository, or the kind and the message of an error.
_Answer = Remote | tuple[type[ModelUnusable] | type[HubUnreachable], str]
_answers: dict[object, tuple[float, _Answer]] = {}


def is_elsewhere(env: Mapping[str, str]) -> bool:
    """Whether vLLM takes its models from another hub, of which nothing is known here. env: the engine's own variables."""
    return (env.get("VLLM_USE_MODELSCOPE") or os.environ.get("VLLM_USE_MODELSCOPE")) in _TRUE


def is_absent(spec: ModelConfig, env: Mapping[str, str]) -> bool:
    """Whether the model is a hub's, and this machine has nothing of it. env: the engine's own variables."""
    return not spec.model.startswith("/") and not is_elsewhere(env) and folder_of(spec.model, spec.revision, env) is None


def look(spec: ModelConfig, env: Mapping[str, str]) -> Remote:
    """The repository of an absent model. Blocks for one answer of the hub.

    Raises ModelUnusable where the hub says that there is none, or that this machine may not have it, and HubUnreachable where it says
    nothing.
    """
    key = _key(spec, env)
    at_s, answer = _answers.get(key, (0.0, None))
    if answer is None or time.monotonic() - at_s > KEPT_S:
        answer = _asked(spec, env)
        _answers[key] = time.monotonic(), answer
    if isinstance(answer, Remote):
        return answer
    kind, message = answer
    raise kind(message, client_message=message)


def looked_at(spec: ModelConfig, env: Mapping[str, str]) -> Remote | None:
    """The last result of `look`; None if it was not called. Sends no request."""
    _, answer = _answers.get(_key(spec, env), (0.0, None))
    return answer if isinstance(answer, Remote) else None


def _key(spec: ModelConfig, env: Mapping[str, str]) -> object:
    variables = frozenset((name, value) for name, value in env.items() if name.startswith(("HF_", "TRANSFORMERS_")))
    return spec.model, spec.revision, variables


def _asked(spec: ModelConfig, env: Mapping[str, str]) -> _Answer:
    try:
        hub = Hub(spec.model, spec.revision, env)
        listing = hub.listing()
    except CheckpointUnread as error:
        return HubUnreachable, f"{spec.model} is not on this machine, and its hub does not answer. {error.explanation}"
    except (CheckpointError, ConfigError) as error:
        # Errors of Hub name the repository, its host and what to set: nothing of this machine.
        return ModelUnusable, error.message
    if not holds_model(listing.sizes):
        return ModelUnusable, f"{spec.model} has no config.json on its hub, so vLLM cannot serve it. Check `model` in its entry."
    return Remote(listing.commit, listing.sizes.keys(), cache(partial(hub.whole, listing.commit)))
