"""The pass-through: what reaches the engine, what comes back, and how an exchange ends early."""

from __future__ import annotations

import json

from tests.gateway.fakes import ANSWER, DONE, EVENT, STREAM_HEAD, Running, chunked

BODY = b'{ "model" : "tiny",  "messages":[{"role":"user","content":"caf\xc3\xa9"}] , "stream":false}'


async def test_the_same_bytes_reach_the_engine_and_come_back(gateway: Running) -> None:
    answer = await gateway.post("/v1/chat/completions", BODY)
    assert (answer.status, answer.body) == (200, ANSWER)
    (heard,) = gateway.engine.heard
    assert heard.body == BODY
    assert heard.head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert gateway.supervisor.leased == [("tiny", False)]
    assert gateway.supervisor.held == 0


async def test_a_stream_is_passed_on_unaltered(gateway: Running) -> None:
    gateway.engine.replies(STREAM_HEAD, chunked(EVENT, EVENT, end=False), chunked(EVENT, DONE))
    answer = await gateway.post("/v1/chat/completions", BODY)
    assert answer.body == EVENT * 3 + DONE
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["cache-control"] == "no-cache"
    assert json.dumps(BODY.decode())
