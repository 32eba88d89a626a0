"""The model list of the OpenAI API, from a snapshot. Never asks an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkd.errors import UnknownModel
from sparkd.snapshot import ModelView


def models_list(models: Mapping[str, ModelView], *, with_aliases: bool) -> dict[str, Any]:
    """`GET /v1/models`: what can be served, resident or not; `status` says where each stands."""
    data = []
    for view in models.values():
        if view.unlisted:
            continue
        data.append(_entry(view, view.name))
        if with_aliases:
            data.extend(_entry(view, alias) for alias in view.aliases)
    return {"object": "list", "data": data}


def model_entry(models: Mapping[str, ModelView], name: str) -> dict[str, Any]:
    """`GET /v1/models/{name}`, by name or alias. Raises UnknownModel."""
    view = find_model(models, name)
    if view is None:
        raise UnknownModel(name, [view.name for view in models.values() if not view.unlisted])
    return _entry(view, name)


def find_model(models: Mapping[str, ModelView], name: str) -> ModelView | None:
    view = models.get(name)
    if view is not None:
        return view
    return next((view for view in models.values() if name in view.aliases), None)


def _entry(view: ModelView, name: str) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": int(view.created_at_s),
        "owned_by": "sparkd",
        "root": view.name,
        "parent": None,
        "status": _status(view),
    }
    if view.max_model_len is not None:
        entry["max_model_len"] = view.max_model_len
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
