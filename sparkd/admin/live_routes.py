"""The admin API's routes of the page: its stream, and the series that it draws."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import Response

from sparkd.admin.answers import answers
from sparkd.admin.live import Live
from sparkd.admin.live_document import LiveDocument
from sparkd.admin.streams import Endless
from sparkd.errors import UnknownRoute
from sparkd.state.series import Excerpt

DAY_S = 86400
MOST_SERIES = 64


def register_live(api: APIRouter, live: Live | None) -> None:
    @api.get(
        "/live",
        **answers(LiveDocument, media_type="text/event-stream"),
        summary="The page's stream: `snapshot`, the whole document, once a second",
    )
    async def stream() -> Response:
        return Endless(_part(live).stream.follow(), media_type="text/event-stream", headers={"cache-control": "no-cache"})

    @api.get("/history", summary="Figures of the last 15 minutes by the second, or of 24 hours by half a minute")
    async def history(
        series: Annotated[list[str], Query(min_length=1, max_length=MOST_SERIES)],
        span_s: Annotated[float, Query(ge=1, le=DAY_S)] = 900.0,
    ) -> Excerpt:
        return await _part(live).excerpt(series, span_s)


def _part(live: Live | None) -> Live:
    if live is None:
        raise UnknownRoute("This daemon keeps no history.")
    return live
