"""The admin API's routes of the requests for models: a list and a cancel. They never show a prompt, an answer or a key."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_type_hints

from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import BaseModel, Field, create_model

from sparkd.admin.answers import answers
from sparkd.control.registry import Registry
from sparkd.gateway.request_log import RequestLog
from sparkd.state.request_store import REQUESTS_KEPT, RequestRow

SHOWN = 100

State = Literal["in_flight", "finished", "answered", "failed"]
# By the state that is asked for, whether the finished requests are those that failed; None: all.
_FAILED: dict[State | None, bool] = {"answered": False, "failed": True}


RequestBody = create_model(
    "RequestBody",
    __doc__=RequestRow.__doc__,
    **{name: (kind, ...) for name, kind in get_type_hints(RequestRow).items()},  # type: ignore[call-overload]
    tokens_per_s=(float | None, ...),
    failed=(bool, ...),
)


class Requests(BaseModel):
    in_flight: list[RequestBody] = Field(description="Oldest first")  # type: ignore[valid-type]
    finished: list[RequestBody] = Field(  # type: ignore[valid-type]
        description="Newest first, by their end"
    )
    next: int | None = Field(description="The `before` of the next page")


def register_requests(api: APIRouter, log: RequestLog, registry: Registry) -> None:
    @api.get("/requests", **answers(Requests), summary="Requests for models: those in flight, and the last finished ones")
    async def requests(
        limit: Annotated[int, Query(ge=1, le=REQUESTS_KEPT)] = SHOWN,
        before: Annotated[int | None, Query(ge=1, lt=1 << 63)] = None,
        model: str | None = None,
        state: State | None = None,
    ) -> Response:
        in_flight = log.in_flight(model) if state in (None, "in_flight") else []
        finished = await log.finished(before, limit, model, _FAILED.get(state)) if state != "in_flight" else []
        if model and not in_flight and not finished:
            registry.find(model)  # else a mistyped name would look like a model without requests
        following = finished[-1].number if len(finished) == limit else None
        return Response(await asyncio.to_thread(_json, in_flight, finished, following), media_type="application/json")

    @api.delete("/requests/{request_id}", **answers(RequestBody, 202), summary="Cancel a request in flight; its client gets an error")
    async def cancel_request(request_id: str) -> dict[str, Any]:
        return log.cancel(request_id).body()


def _json(in_flight: Sequence[RequestRow], finished: Sequence[RequestRow], following: int | None) -> str:
    return json.dumps({"in_flight": [row.body() for row in in_flight], "finished": [row.body() for row in finished], "next": following})
