"""One real question to a model: over which route it goes, and what counts as an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from sparkd.daemon.gateway_client import GatewayClient
from sparkd.errors import EngineError, SparkdError, Unavailable
from tests.sparkd.gateway.fakes import Heard
from tests.support.facts import lacking
from tests.support.waiting import HUNG_S, eventually

CHAT, COMPLETION, EMBEDDING, SCORE, RERANK = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
)
SAID = {"choices": [{"message": {"role": "assistant", "content": "Paris."}}]}
REFUSED = (404, {"error": {"message": "not this way"}})


@dataclass
class Gateway:
    """Answers each path as `answers` says, 404 otherwise; an answer that is bytes goes out as it stands."""

    answers: dict[str, tuple[int, Any] | bytes] = field(default_factory=dict)
    heard: list[tuple[str, Heard]] = field(default_factory=list)
    url: str = ""

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.heard]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                heard = Heard((await reader.readuntil(b"\r\n\r\n"))[:-4], b"")
                heard.body = await reader.readexactly(int(heard.headers["content-length"]))
                path = heard.head.split()[1].decode()
                self.heard.append((path, heard))
                answer = self.answers.get(path, REFUSED)
                if not isinstance(answer, bytes):
                    body = json.dumps(answer[1]).encode()
                    answer = b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (answer[0], len(body), body)
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


@asynccontextmanager
async def asking(
    answers: dict[str, Any], *, key: str | None = "k", probe: str | None = "p"
) -> AsyncIterator[tuple[GatewayClient, Gateway]]:
    gateway = Gateway(answers)
    server = await asyncio.start_server(gateway.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    asker = GatewayClient(f"http://127.0.0.1:{port}", key, probe)
    try:
        yield asker, gateway
    finally:
        await asker.close()
        server.close()


@pytest.mark.parametrize(
    ("answers", "paths"),
    [
        ({CHAT: (200, SAID)}, [CHAT]),
        ({CHAT: (400, {"error": {"message": "no chat template"}}), COMPLETION: (200, {"choices": [{"text": "r"}]})}, [CHAT, COMPLETION]),
        ({EMBEDDING: (200, {"data": [{"embedding": [0.0]}]})}, [CHAT, COMPLETION, EMBEDDING]),
        ({CHAT: (501, {}), COMPLETION: (405, {}), EMBEDDING: (422, {}), SCORE: (200, {"data": [{"score": 0}]})},
         [CHAT, COMPLETION, EMBEDDING, SCORE]),
        ({RERANK: (200, {"results": [{"index": 0}]})}, [CHAT, COMPLETION, EMBEDDING, SCORE, RERANK]),
    ],
    ids=["chat", "completion", "embedding", "score", "rerank"],
)  # fmt: skip
async def test_warm_takes_the_first_way_that_the_model_answers(answers: dict[str, Any], paths: list[str]) -> None:
    async with asking(answers) as (asker, gateway):
        await asker.warm("m", HUNG_S)

        assert gateway.paths == paths
        bodies = [json.loads(heard.body) for _, heard in gateway.heard]
        assert all(body["model"] == "m" for body in bodies)
        assert all(body["max_tokens"] <= 4 for body in bodies[:2])


@pytest.mark.parametrize(
    ("answers", "error", "words"),
    [
        ({}, EngineError, f"{CHAT} answered 404, {COMPLETION} answered 404, {EMBEDDING} answered 404"),
        ({CHAT: (500, {"error": {"message": "boom"}})}, EngineError, f"{CHAT} answered 500"),
        ({CHAT: (503, {"error": {}})}, Unavailable, f"m: {CHAT} answered 503"),
        ({CHAT: (200, {"choices": []})}, EngineError, "200 without choices"),
        ({CHAT: b"HTTP/1.1 500 X\r\ncontent-length: 5\r\n\r\nhello"}, EngineError, f"{CHAT} answered 500"),
        ({CHAT: b"what?\r\n\r\n"}, Unavailable, f"on {CHAT}"),
    ],
)
async def test_warm_without_an_answer(answers: dict[str, Any], error: type[SparkdError], words: str) -> None:
    async with asking(answers) as (asker, _):
        with pytest.raises(error) as caught:
            await asker.warm("m", HUNG_S)

    assert words in caught.value.message
    assert "boom" not in caught.value.message


async def test_what_trickles_in_for_ever_is_no_answer() -> None:
    async with asking({CHAT: b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{"}) as (asker, _):
        with pytest.raises(Unavailable, match="within 0 s"):
            await asker.warm("m", 0.05)
        with pytest.raises(Unavailable, match="within 0 s"):
            await asker.chat("m", "Why?", 0.05)


async def test_nobody_listens() -> None:
    asker = GatewayClient("http://127.0.0.1:9", None)
    with pytest.raises(Unavailable, match="ConnectError"):
        await asker.warm("m", HUNG_S)
    await asker.close()


async def test_key_and_probe_token_go_along_and_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    async with asking({CHAT: (200, SAID)}) as (asker, gateway):
        await asker.warm("m", HUNG_S)
    async with asking({CHAT: (200, SAID)}, key=None, probe=None) as (asker, open_gateway):
        await asker.warm("m", HUNG_S)

    first, second = gateway.heard[0][1].headers, open_gateway.heard[0][1].headers
    assert (first["authorization"], first["x-sparkd-probe"]) == ("Bearer k", "p")
    assert {"authorization", "x-sparkd-probe"} & second.keys() == set()


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "Paris."}, "Paris."),
        ({"content": None, "reasoning": "Let me think"}, "Let me think"),
        ({"content": None}, ""),
    ],
)
async def test_the_text_of_a_chat(message: dict[str, Any], text: str) -> None:
    async with asking({CHAT: (200, {"choices": [{"message": message}]})}) as (asker, gateway):
        assert await asker.chat("m", "Where?", HUNG_S, max_tokens=7) == text

    sent = json.loads(gateway.heard[0][1].body)
    assert sent == {"model": "m", "messages": [{"role": "user", "content": "Where?"}], "max_tokens": 7, "temperature": 0}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, {"error": {"message": "Not known here."}}), ["m", "404", "Not known here."]),
        ((500, {}), ["m", "500", "no reason"]),
    ],
)
async def test_a_chat_without_an_answer(answer: tuple[int, Any], words: list[str]) -> None:
    async with asking({CHAT: answer}) as (asker, _):
        with pytest.raises(EngineError) as caught:
            await asker.chat("m", "Where?", HUNG_S)
    assert lacking(caught.value.message, *words) == []


async def test_cancelling_ends_the_question() -> None:
    async with asking({CHAT: b""}) as (asker, gateway):
        asking_now = asyncio.create_task(asker.warm("m", HUNG_S))
        await eventually(lambda: gateway.heard, "the question")
        asking_now.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking_now
