"""The admin API's routes of the page: its stream, and the series that it draws. Never decides."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from sparkd.admin.answers import answers
from sparkd.admin.live import Live
from sparkd.admin.page_answers import LiveDocument, SeriesAnswer
from sparkd.admin.streams import Endless
from sparkd.errors import UnknownRoute
from sparkd.state.series import NAME_BYTES

DAY_S = 86400
MOST_SERIES = 64

SeriesName = Annotated[str, Query(max_length=NAME_BYTES)]


def register_live(api: APIRouter, live: Live | None) -> None:
    @api.get(
        "/live",
        **answers(LiveDocument, media_type="text/event-stream"),
        summary="The page's stream: `snapshot`, the whole document, then `change`, a JSON merge patch (RFC 7396), at most one a second",
    )
    async def stream(request: Request) -> Response:
        return Endless(
            _part(live).stream.follow(request.headers.get("last-event-id", "")),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache"},
        )

    @api.get("/history", **answers(SeriesAnswer), summary="Figures of the last 15 minutes by the second, or of 24 hours by half a minute")
    async def history(
        series: Annotated[list[SeriesName], Query(min_length=1, max_length=MOST_SERIES)],
        span_s: Annotated[float, Query(ge=1, le=DAY_S)] = 900.0,
    ) -> dict[str, object]:
        excerpt = asdict(await _part(live).excerpt(series, span_s))
        return {"step_s": excerpt["step_s"], "end_s": excerpt["end_s"], "series": excerpt["values"]}


def _part(live: Live | None) -> Live:
    if live is None:
        raise UnknownRoute("This daemon keeps no history.")
    return live
