"""Owns whether a hub id that is not on this machine is a model on its hub, before an engine is started for it. Never downloads a weight."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from sparkd.checkpoint import MAX_JSON_BYTES
from sparkd.errors import CheckpointError, ConfigError, HubSilent, HubUnreachable, ModelUnusable
from sparkd.models.folder import holds_model
from sparkd.models.hub import Hub
from sparkd.models.source import folder_of
from sparkd.schema.model import ModelConfig

# An answer counts for so long: a start asks several times, and so does every client that waits.
KEPT_S = 30.0
# With these vLLM takes its models from another hub.
_ELSEWHERE = ("VLLM_USE_MODELSCOPE",)
_TRUE = ("1", "true", "True", "TRUE")
_NEAR = 0.8


@dataclass(slots=True)
class Remote:
    """A repository's files at one commit, its small ones read when they are asked for and once. Raises CheckpointError."""

    names: Collection[str]
    read: Callable[[str], bytes]
    commit: str | None = None
    kept: dict[str, bytes] = field(default_factory=dict)

    def content(self, name: str) -> bytes:
        if name not in self.kept:
            self.kept[name] = self.read(name)
        return self.kept[name]


_Answer = Remote | ModelUnusable | HubUnreachable
_answers: dict[str, tuple[float, _Answer]] = {}


def is_elsewhere(env: Mapping[str, str]) -> bool:
    """Whether vLLM takes its models from another hub, of which nothing is known here. env: the engine's own variables."""
    return any((env.get(name) or os.environ.get(name)) in _TRUE for name in _ELSEWHERE)


def is_absent(spec: ModelConfig, env: Mapping[str, str]) -> bool:
    """Whether the model is a hub's, and this machine has nothing of it. env: the engine's own variables."""
    return not spec.model.startswith("/") and not is_elsewhere(env) and folder_of(spec.model, spec.revision, env) is None


def look(spec: ModelConfig, env: Mapping[str, str], near: Iterable[str] = ()) -> Remote:
    """The repository of an absent model. near: ids that a mistyped one may have meant. Blocks for one answer of the hub.

    Raises ModelUnusable where the hub says that there is none, or that this machine may not have it, and HubUnreachable where it says
    nothing.
    """
    key, now_s = _key(spec, env), time.monotonic()
    answer = _answers.get(key)
    if answer is None or now_s - answer[0] > KEPT_S:
        # Other threads add to it meanwhile.
        for old in [old for old, (at_s, _) in list(_answers.items()) if now_s - at_s > KEPT_S]:
            _answers.pop(old, None)
        answer = _answers[key] = (time.monotonic(), _asked(spec, env, near))
    if isinstance(answer[1], Remote):
        return answer[1]
    raise answer[1]


def looked_at(spec: ModelConfig, env: Mapping[str, str]) -> Remote | None:
    """The last result of `look`; None if it was not called. Sends no request."""
    answer = _answers.get(_key(spec, env))
    return answer[1] if answer is not None and isinstance(answer[1], Remote) else None


def _key(spec: ModelConfig, env: Mapping[str, str]) -> str:
    """A digest, because a token is part of it."""
    parts = [spec.model, spec.revision, sorted((name, value) for name, value in env.items() if name.startswith(("HF_", "TRANSFORMERS_")))]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _asked(spec: ModelConfig, env: Mapping[str, str], near: Iterable[str]) -> _Answer:
    try:
        hub = Hub(spec.model, spec.revision, env)
        listing = hub.listing()
    except HubSilent as error:
        message = f"{spec.model} is not on this machine, and its hub does not answer. {error.explanation}"
        return HubUnreachable(message, client_message=message)
    except (CheckpointError, ConfigError) as error:
        # Errors of Hub name the repository, its host and what to set: nothing of this machine.
        message = f"{error.message}{_meant(spec.model, near)}"
        return ModelUnusable(message, client_message=message)
    if not holds_model(listing.sizes):
        message = f"{spec.model} has no config.json on its hub, so vLLM cannot serve it. Check `model` in its entry."
        return ModelUnusable(message, client_message=message)
    return Remote(listing.sizes.keys(), lambda name: hub.whole(listing.commit, name, MAX_JSON_BYTES), listing.commit)


def _meant(hub_id: str, near: Iterable[str]) -> str:
    matches = difflib.get_close_matches(hub_id, sorted(set(near) - {hub_id}), 1, _NEAR)
    return f" Did you mean {matches[0]}?" if matches else ""
