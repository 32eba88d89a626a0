"""Holds each answer of the admin API against the type that its document gives for it: nothing more, nothing less, nothing else."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.routing import Match


def check_answer(app: FastAPI, method: str, path: str, status: int, body: Any) -> None:
    """path: without the query. A refusal and what is streamed have types of their own."""
    scope = {"type": "http", "method": method, "path": path, "headers": [], "root_path": ""}
    route = next((route for route in app.router.routes if route.matches(scope)[0] is Match.FULL), None)
    if not isinstance(route, APIRoute):
        return
    if route.response_model is not None:
        return  # it is what has made the body
    model = route.responses[status]["model"]
    adapter: TypeAdapter[Any] = TypeAdapter(model)
    shown = adapter.dump_python(adapter.validate_python(body), mode="json", exclude_unset=True)
    assert shown == body, f"{method} {path} is not what the document says"
