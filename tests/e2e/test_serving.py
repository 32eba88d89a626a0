"""End to end: real clients, real gateway, real Ray, real vLLM, a real model with a checkable answer."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import KV_BYTES, NAME, engine_metric
from tests.support.daemon_process import DaemonProcess
from tests.support.processes import members
from tests.support.waiting import HUNG_S, until

QUESTION = "What is the capital of France?"
LONG = {"max_tokens": 1500, "ignore_eos": True}


def running(served: DaemonProcess) -> float:
    return engine_metric(served, "vllm:num_requests_running")


def raw_request(served: DaemonProcess, **fields: Any) -> socket.socket:
    """A chat request on a socket of its own, sent and not yet answered."""
    body = json.dumps({"model": NAME, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0} | fields).encode()
    client = socket.create_connection(("127.0.0.1", served.port), timeout=HUNG_S)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


def test_ready_means_it_answered_and_the_first_user_gets_paris(served: DaemonProcess) -> None:
    answer = served.chat(NAME, QUESTION).json()

    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["model"] == NAME


def test_vllms_own_routes_are_served_and_what_the_model_has_not_is_refused(served: DaemonProcess) -> None:
    until(lambda: served.model(NAME)["max_model_len"] == 2048, "the engine told of itself")
    (listed,) = [entry for entry in served.get("/v1/models/")["data"] if entry["id"] == NAME]
    assert (listed["max_model_len"], listed["root"]) == (2048, served.model(NAME)["source"])
    assert set(served.get(f"/version?model={NAME}")) == {"version"}
    assert "server_load" in served.get(f"/load?model={NAME}")
    assert served.client.get("/ping").status_code == 200
    asked = {"model": NAME, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 8}
    invoked = served.client.post("/invocations", json=asked, headers={"endpoint-load-metrics-format": "JSON"})
    assert "Paris" in invoked.json()["choices"][0]["message"]["content"]
    reported = served.client.post("/v1/chat/completions", json=asked, headers={"endpoint-load-metrics-format": "JSON"})
    assert "endpoint-load-metrics" in reported.headers
    refusals = [served.client.post(path, json={"model": NAME, "input": "x"}) for path in ("/v1/embeddings", "/rerank")]
    refusals.append(served.client.get(f"/tokenizer_info?model={NAME}"))  # a flag of vLLM's adds it
    assert [(one.status_code, one.json()["error"]["code"]) for one in refusals] == [(404, "route_not_served")] * 3


def test_a_stream_arrives_in_pieces_and_says_the_same(served: DaemonProcess) -> None:
    whole = served.chat(NAME, QUESTION).json()["choices"][0]["message"]["content"]
    pieces, arrivals = [], []
    body = {"model": NAME, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 16, "stream": True}
    with served.client.stream("POST", "/v1/chat/completions", json=body) as stream:
        assert stream.headers["x-accel-buffering"] == "no"
        for chunk in stream.iter_raw():
            arrivals.append(chunk)
            pieces.append(chunk)
    events = [line[6:] for line in b"".join(pieces).decode().splitlines() if line.startswith("data: ")]
    text = "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1] if json.loads(event)["choices"])

    assert events[-1] == "[DONE]"
    assert len(arrivals) > 1
    assert text == whole


def test_the_official_openai_client_works_unchanged(served: DaemonProcess) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused")
    listed = [model.id for model in client.models.list()]
    chat = client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=16)
    stream = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=16, stream=True
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    completion = client.completions.create(model=NAME, prompt="The capital of France is", temperature=0, max_tokens=4)
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "x"}])
    client.close()

    assert NAME in listed
    assert "Paris" in (chat.choices[0].message.content or "")
    assert "Paris" in streamed
    assert "Paris" in completion.choices[0].text
    assert NAME in str(raised.value)


def test_the_official_openai_client_uses_responses(served: DaemonProcess) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused")
    response = client.responses.create(model=NAME, input=QUESTION, temperature=0, max_output_tokens=16)
    client.close()

    assert "Paris" in response.output_text


def test_the_official_anthropic_client_works_unchanged(served: DaemonProcess) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=served.url, api_key="unused")
    message = client.messages.create(
        model="claude-sonnet", max_tokens=16, messages=[{"role": "user", "content": QUESTION}], extra_body={"temperature": 0}
    )
    with client.messages.stream(model="claude-sonnet", max_tokens=16, messages=[{"role": "user", "content": QUESTION}]) as stream:
        streamed = stream.get_final_text()
    counted = client.messages.count_tokens(model="claude-sonnet", messages=[{"role": "user", "content": QUESTION}])
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nobody", max_tokens=4, messages=[{"role": "user", "content": "x"}])
    client.close()

    assert "Paris" in message.content[0].text  # type: ignore[union-attr]
    assert streamed
    assert counted.input_tokens > 5


def test_tokenize_and_detokenize_are_each_others_inverse(served: DaemonProcess) -> None:
    tokens = served.client.post("/tokenize", json={"model": NAME, "prompt": QUESTION, "add_special_tokens": False}).json()["tokens"]
    text = served.client.post("/detokenize", json={"model": NAME, "tokens": tokens}).json()["prompt"]

    assert text == QUESTION


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "not streaming"])
def test_a_client_that_leaves_ends_its_request_in_vllm(served: DaemonProcess, stream: bool) -> None:
    before = engine_metric(served, "vllm:generation_tokens_total")
    client = raw_request(served, stream=stream, **LONG)
    until(lambda: running(served) == 1, "vLLM works on it")
    client.close()

    until(lambda: running(served) == 0, "vLLM stopped")
    assert engine_metric(served, "vllm:generation_tokens_total") - before < LONG["max_tokens"]
    until(lambda: served.model(NAME)["in_flight"] == 0, "its lease is released")


def test_a_client_that_leaves_while_queued_in_vllm_is_aborted_too(served: DaemonProcess) -> None:
    """max_num_seqs is 4: the fifth request waits inside the engine."""
    before = engine_metric(served, "vllm:generation_tokens_total")
    clients = [raw_request(served, stream=True, **LONG) for _ in range(5)]
    until(lambda: engine_metric(served, "vllm:num_requests_waiting{") == 1, "the fifth waits")
    for client in reversed(clients):
        client.close()

    until(lambda: running(served) == 0 and engine_metric(served, "vllm:num_requests_waiting{") == 0, "all are gone")
    assert engine_metric(served, "vllm:generation_tokens_total") - before < 4 * LONG["max_tokens"]


def test_metrics_of_the_engine_carry_model_and_node(served: DaemonProcess) -> None:
    assert served.chat(NAME, QUESTION).status_code == 200
    labels = (f'model="{NAME}"', 'node="127.0.0.1"')
    until(lambda: served.metric("vllm:generation_tokens_total", *labels) > 0, "a scrape after the answer", 0.5)


def test_how_its_cache_was_sized_is_told(served: DaemonProcess) -> None:
    """vLLM rounds down to whole blocks."""
    kv = served.model(NAME)["progress"]["kv"]

    assert (kv["phase"], kv["rank"], kv["why"]) == ("ready", 0, None)
    assert 0.99 * KV_BYTES < kv["pool_bytes"] <= KV_BYTES
    assert kv["tokens"] == served.metric("sparkd_model_kv_cache_tokens", f'model="{NAME}"') > 8000
    assert kv["slack_bytes"] > kv["margin_bytes"] > 0


def test_the_engine_is_reachable_by_its_socket_alone(served: DaemonProcess) -> None:
    (rank,) = served.model(NAME)["ranks"]
    assert (rank["host"], rank["port"]) == (None, None)
    assert Path(rank["socket_path"]).stat().st_mode & 0o077 == 0
    engine = members(rank["pid"])
    assert len(engine) > 1, "the API server and what it started"
    listening = [one for pid in engine for one in psutil.Process(pid).net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert {one.laddr.ip for one in listening} <= {"127.0.0.1", "::1"}


def test_the_daemon_is_killed_and_the_next_answers_at_once_with_the_same_engine(served: DaemonProcess) -> None:
    rank, tokens = served.pid_of(NAME), engine_metric(served, "vllm:generation_tokens_total")
    served.kill()
    served.start()
    until(lambda: _paris(served), "an answer")

    assert served.pid_of(NAME) == rank
    assert engine_metric(served, "vllm:generation_tokens_total") > tokens
    served.ray_connected()


def _paris(served: DaemonProcess) -> bool:
    try:
        answer = served.chat(NAME, QUESTION)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200 and "Paris" in answer.json()["choices"][0]["message"]["content"]
