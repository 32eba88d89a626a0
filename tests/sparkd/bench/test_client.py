"""The bench's client: the daemon's own sentence in a refusal, what the engine counts, and no key outside of a header."""

from __future__ import annotations

import httpx
import pytest

from sparkd.bench.client import Client, has_token
from sparkd.bench.job import Job
from sparkd.bench.load_bench import LoadBench
from sparkd.errors import RankError

KEY = "canary-0123456789"


def client(answer: httpx.Response | Exception) -> Client:
    def handle(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == f"Bearer {KEY}" and KEY not in str(request.url)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return Client("http://127.0.0.1:4000", KEY, httpx.MockTransport(handle))


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (httpx.Response(409, json={"error": {"message": "m is loading.", "code": "conflict"}}), "m is loading."),
        (httpx.Response(502, text="<html>"), "did not answer GET /models/m"),
        (httpx.ConnectError("refused"), "did not answer GET /models/m"),
    ],
)
async def test_a_refusal_is_the_daemons_sentence(answer: httpx.Response | Exception, sentence: str) -> None:
    with pytest.raises(RankError) as error:
        await client(answer).model("m")
    assert sentence in error.value.message and KEY not in error.value.message


@pytest.mark.parametrize(
    ("state", "reason"), [("SUCCEEDED", None), ("FAILED", "Read-only file system."), ("CANCELLED", "It was cancelled.")]
)
async def test_a_long_action_is_followed_to_its_end(state: str, reason: str | None) -> None:
    ended = client(httpx.Response(200, json={"id": "7", "state": state, "message": reason})).finished({"id": "7", "state": "RUNNING"})
    if reason is None:
        await ended
    else:
        with pytest.raises(RankError, match=reason):
            await ended


async def test_an_engine_without_an_answer_has_no_counters() -> None:
    assert await client(httpx.Response(503, json={"error": {"message": "Not READY."}})).counters("m") is None
    counters = await client(httpx.Response(200, json={"text": "vllm:prompt_tokens_total 7\n"})).counters("m")
    assert counters is not None and counters.values["prompt_tokens_total"] == 7


def test_a_job_shows_no_key() -> None:
    job = Job(state_dir="/x", bench="b", base_url="http://127.0.0.1:4000", admin_key=KEY, key=KEY, work=LoadBench())  # type: ignore[arg-type]
    assert KEY not in repr(job) and Job.model_validate_json(job.model_dump_json()) == job


@pytest.mark.parametrize(
    ("line", "brings"),
    [
        ('data: {"choices": [{"text": "a"}]}', True),
        ('data: {"choices": [{"text": ""}]}', False),
        ("data: [DONE]", False),
        (": here", False),
    ],
)
def test_the_first_token_is_a_piece_with_text(line: str, brings: bool) -> None:
    assert has_token(line) is brings
