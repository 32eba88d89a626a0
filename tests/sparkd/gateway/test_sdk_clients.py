"""The official clients, unchanged, against the gateway and the stub engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib import import_module
from typing import TYPE_CHECKING

import pytest

from sparkd.errors import ModelLoading
from tests.sparkd.gateway.fakes import EVENT, KEY, STREAM_HEAD, RawEngine, Running, chunked, serving

if TYPE_CHECKING:
    import anthropic
    import openai

ASKED = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
async def chat(stubbed: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    import openai

    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{stubbed.port}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(stubbed: Running) -> AsyncIterator[anthropic.AsyncAnthropic]:
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{stubbed.port}", api_key=KEY, max_retries=0) as client:
        yield client


async def test_openai_embeddings_and_audio(chat: openai.AsyncOpenAI) -> None:
    assert (await chat.embeddings.create(model="tiny", input="Paris")).data[0].embedding
    assert (await chat.audio.transcriptions.create(model="tiny", file=("a.wav", b"\x00" * 300_000))).text


async def test_openai_errors(stubbed: Running, chat: openai.AsyncOpenAI) -> None:
    import openai

    with pytest.raises(openai.NotFoundError) as caught:
        await chat.chat.completions.create(model="nobody", messages=ASKED)
    assert caught.value.code == "model_not_found"
    assert caught.value.request_id.startswith("req-")
    with pytest.raises(openai.AuthenticationError):
        await chat.with_options(api_key="wrong").chat.completions.create(model="tiny", messages=ASKED)
    loading = ModelLoading("The model is loading.", loading={"model": "tiny", "state": "LOADING"}, retry_after_s=7)
    stubbed.supervisor.refusal = loading
    with pytest.raises(openai.InternalServerError) as unavailable:
        await chat.chat.completions.create(model="tiny", messages=ASKED)
    assert unavailable.value.response.headers["retry-after"] == "7"
    assert unavailable.value.response.json()["loading"] == loading.loading


async def test_openai_learns_of_a_broken_stream(engine: RawEngine) -> None:
    import openai

    engine.replies(STREAM_HEAD, chunked(EVENT, end=False), then_close=True)
    async with (
        serving(engine) as gateway,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(model="tiny", messages=ASKED, stream=True)
        with pytest.raises(openai.APIError, match="early"):
            async for _ in stream:
                pass
        engine.replies(STREAM_HEAD, chunked(EVENT, EVENT[:20], end=False), then_close=True)
        stream = await client.chat.completions.create(model="tiny", messages=ASKED, stream=True)
        # httpx or httpx2, as the release of openai has it.
        http_error = import_module(openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0]).HTTPError
        with pytest.raises((openai.APIError, http_error)):
            async for _ in stream:
                pass


async def test_openai_learns_of_a_broken_response(engine: RawEngine) -> None:
    """By that API's own event, which names the reason and is its last."""
    import openai

    created = b'event: response.created\ndata: {"type":"response.created","sequence_number":0,"response":{"id":"resp_7","output":[]}}\n\n'
    engine.replies(STREAM_HEAD, chunked(created, end=False), then_close=True)
    async with (
        serving(engine) as gateway,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = await client.responses.create(model="tiny", input="hi", stream=True)
        events = [event async for event in stream]
    assert [(event.type, event.sequence_number, event.response.id) for event in events] == [
        ("response.created", 0, "resp_7"),
        ("response.failed", 1, "resp_7"),
    ]
    assert "early" in events[1].response.error.message


async def test_anthropic_errors(claude: anthropic.AsyncAnthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as caught:
        await claude.messages.create(model="nobody", max_tokens=50, messages=ASKED)
    assert caught.value.body["error"]["type"] == "not_found_error"
    assert caught.value.body["error"]["src"] == "sparkd"
    with pytest.raises(anthropic.AuthenticationError):
        await claude.with_options(api_key="wrong").messages.create(model="tiny", max_tokens=50, messages=ASKED)


async def test_anthropic_learns_of_a_broken_stream(engine: RawEngine) -> None:
    import anthropic

    event = b'event: ping\ndata: {"type":"ping"}\n\n'
    engine.replies(STREAM_HEAD, chunked(event, end=False), then_close=True)
    async with (
        serving(engine) as gateway,
        anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{gateway.port}", api_key="none", max_retries=0) as client,
    ):
        stream = await client.messages.create(model="tiny", max_tokens=50, messages=ASKED, stream=True)
        with pytest.raises(anthropic.APIError):
            async for _ in stream:
                pass
