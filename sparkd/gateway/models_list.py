"""The model list of the OpenAI API, from a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkd.errors import BadRequest, UnknownModel
from sparkd.state.snapshot import ModelView

_SHOWN_NAMES = 20
# OpenAI's type requires the member. sparkd does not know when a model was made; the time of its own start would change with each restart.
_CREATED_S = 0


def models_list(models: Mapping[str, ModelView], *, with_aliases: bool, paths: bool) -> dict[str, Any]:
    """`GET /v1/models`: what can be served, resident or not; `status` says where each stands. paths: the client may see folders' paths."""
    data = []
    for view in models.values():
        if view.unlisted:
            continue
        data.append(_entry(view, view.name, paths))
        if with_aliases:
            data.extend(_entry(view, alias, paths) for alias in view.aliases)
    return {"object": "list", "data": data}


def model_entry(models: Mapping[str, ModelView], name: str, *, paths: bool) -> dict[str, Any]:
    """`GET /v1/models/{name}`, by name or alias. Raises UnknownModel."""
    view = find_model(models, name)
    if view is None:
        raise UnknownModel(name, [view.name for view in models.values() if not view.unlisted])
    return _entry(view, name, paths)


def find_model(models: Mapping[str, ModelView], name: str) -> ModelView | None:
    view = models.get(name)
    if view is not None:
        return view
    return next((view for view in models.values() if name in view.aliases), None)


def model_meant(models: Mapping[str, ModelView]) -> str:
    """The model of a request that names none: the entry's with `default: true`, else the only one. Raises BadRequest."""
    listed = sorted(view.name for view in models.values() if not view.unlisted)
    default = next((view.name for view in models.values() if view.default), None)
    if default is not None:
        return default
    if len(listed) == 1:
        return listed[0]
    if not listed:
        raise BadRequest("The request names no model. Send `model`.", param="model")
    shown = ", ".join(listed[:_SHOWN_NAMES])
    cure = "Send `model`, or set `default: true` on one of them in sparkd.yaml"
    raise BadRequest(f"The request names no model, and there are {len(listed)}: {shown}. {cure}.", param="model")


def _entry(view: ModelView, name: str, paths: bool) -> dict[str, Any]:
    """An entry of OpenAI's model list, with vLLM's `root` and `max_model_len` and sparkd's own facts."""
    folder = view.source.startswith("/")
    entry: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": _CREATED_S,
        "owned_by": "sparkd",
        "root": view.source.rstrip("/").rpartition("/")[2] if folder and not paths else view.source,
        "max_model_len": view.max_model_len,
        "status": _status(view),
    }
    if view.metadata:
        entry["metadata"] = dict(view.metadata)
    return entry


def _status(view: ModelView) -> dict[str, Any]:
    status: dict[str, Any] = {
        "state": view.state.value,
        "want": view.want.value,
        "in_flight": view.in_flight,
        "queued": view.queued,
        "reason": view.reason,
        "message": view.message,
    }
    if view.progress is not None:
        status |= {
            "phase": view.progress.phase,
            "progress": view.progress.fraction,
            "bytes_done": view.progress.bytes_done,
            "bytes_total": view.progress.bytes_total,
            "eta_seconds": view.progress.eta_s,
        }
    return {key: value for key, value in status.items() if value is not None}
