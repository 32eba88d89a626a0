"""The admin API's routes of the requests for models: the list and its pages, a cancel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from sparkd.gateway.exchange import Exchange, Tokens
from sparkd.gateway.request_log import RequestLog
from sparkd.state.request_store import RequestStore
from tests.sparkd.admin.test_app import Admin, admin_of


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[RequestLog]:
    log = RequestLog(RequestStore(tmp_path / "state.db"))
    yield log
    await log.close()


@pytest.fixture
async def admin(tmp_path: Path, log: RequestLog) -> AsyncIterator[Admin]:
    async with admin_of(tmp_path, {"requests": log}) as made:
        yield made


async def no_body() -> Message:
    return {"type": "http.disconnect"}


async def no_answer(message: Message) -> None:
    return None


def asked(log: RequestLog, number: int, **facts: Any) -> Exchange:
    scope = {"path": "/v1/chat/completions", "headers": [(b"x-request-id", f"req-{number}".encode())]}
    exchange = Exchange(scope, no_body, no_answer)
    exchange.route, exchange.model = "/v1/chat/completions", "m"
    log.begin(exchange)
    for name, value in facts.items():
        setattr(exchange, name, value)
    return exchange


def finished(log: RequestLog, *numbers: int, **facts: Any) -> None:
    for number in numbers:
        log.end(asked(log, number, **({"status": 200} | facts)))


async def test_a_model_that_is_not_known_is_refused_with_the_names_that_are(admin: Admin, log: RequestLog) -> None:
    finished(log, 1, model="removed-since")

    assert (await admin.ask("GET", "/requests?model=m"))["finished"] == []
    assert len((await admin.ask("GET", "/requests?model=removed-since"))["finished"]) == 1
    error = await admin.refused("GET", "/requests?model=nope", 404)
    assert error["code"] == "model_not_found" and error["message"].endswith("m.")


async def test_the_list(admin: Admin, log: RequestLog) -> None:
    finished(log, 1, 2, 3)
    finished(log, 4, status=404, code="model_not_found", model="unknown")
    await log._write()
    finished(log, 5, model="other", key="laptop", tokens=Tokens(7, None, 5), queued_s=0.0)
    asked(log, 6, queued_s=0.25)

    listing = await admin.ask("GET", "/requests")
    assert [row["request_id"] for row in listing["finished"]] == ["req-5", "req-4", "req-3", "req-2", "req-1"]
    newest = listing["finished"][0]
    assert (newest["number"], newest["key"], newest["prompt_tokens"], newest["cached_tokens"], newest["completion_tokens"]) == (
        *(5, "laptop", 7, None, 5),
    )
    assert newest["tokens_per_s"] > 0
    (row,) = listing["in_flight"]
    assert (row["number"], row["phase"], row["status"], row["queued_s"]) == (None, "forwarded", None, 0.25)
    assert listing["next"] is None


async def test_pages_and_filters(admin: Admin, log: RequestLog) -> None:
    finished(log, 1, 2, 3)
    finished(log, 4, status=500, model="other")
    asked(log, 5)
    first = await admin.ask("GET", "/requests?limit=3")
    assert ([row["number"] for row in first["finished"]], first["next"]) == ([4, 3, 2], 2)
    second = await admin.ask("GET", "/requests?limit=3&before=2")
    assert ([row["number"] for row in second["finished"]], second["next"]) == ([1], None)

    other = await admin.ask("GET", "/requests?model=other")
    assert ([row["number"] for row in other["finished"]], other["in_flight"]) == ([4], [])
    failed = await admin.ask("GET", "/requests?state=failed")
    assert ([row["number"] for row in failed["finished"]], failed["in_flight"]) == ([4], [])
    answered = await admin.ask("GET", "/requests?state=answered")
    assert ([row["number"] for row in answered["finished"]], answered["in_flight"]) == ([3, 2, 1], [])
    going = await admin.ask("GET", "/requests?state=in_flight")
    assert (going["finished"], [row["request_id"] for row in going["in_flight"]]) == ([], ["req-5"])
    for query in ("limit=0", "limit=10001", "before=0", "before=9223372036854775808", "state=done", "limit=x"):
        await admin.refused("GET", f"/requests?{query}", 400)


async def test_a_cancel(admin: Admin, log: RequestLog) -> None:
    exchange = asked(log, 1)
    exchange.task = asyncio.create_task(asyncio.Event().wait())
    row = await admin.ask("DELETE", "/requests/req-1", 202)
    assert (row["request_id"], row["phase"]) == ("req-1", "queued")
    with pytest.raises(asyncio.CancelledError):
        await exchange.task
    log.end(exchange)
    assert (await admin.refused("DELETE", "/requests/req-1", 404))["code"] == "not_found"
