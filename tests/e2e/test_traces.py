"""A client's trace goes through the gateway into real vLLM, whose span hangs below the gateway's and tells nothing of the prompt."""

from __future__ import annotations

from tests.e2e.conftest import NAME
from tests.support.daemon_process import DaemonProcess
from tests.support.otlp_receiver import Receiver, tree_of
from tests.support.waiting import until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CHAT = "POST /v1/chat/completions"
CANARY = "canary-77ab01"


def test_the_engines_span_is_below_the_gateways(served: DaemonProcess, collector: Receiver) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": CANARY}], "max_tokens": 4, "stream": True}
    sent = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    assert served.client.post("/v1/chat/completions", json=body, headers=sent).status_code == 200
    until(lambda: sum(span.trace == TRACE for span in collector.spans) >= 4, "four spans")
    spans = [span for span in collector.spans if span.trace == TRACE]

    assert tree_of(spans) == {CHAT: "", "queue": CHAT, "engine": CHAT, "llm_request": "engine"}
    by_name = {span.name: span for span in spans}
    assert by_name[CHAT].parent == PARENT
    assert (by_name["llm_request"].service, by_name["engine"].service) == ("vllm", "sparkd")
    assert by_name["engine"].begun_ns < by_name["llm_request"].begun_ns < by_name["llm_request"].ended_ns < by_name["engine"].ended_ns
    assert {span.state for span in spans} == {"vendor=1"}
    assert not any(CANARY.encode() in body for body in collector.raw)


def test_a_trace_that_begins_at_the_gateway_is_one_for_both(served: DaemonProcess, collector: Receiver) -> None:
    answer = served.chat(NAME, "What is the capital of France?")

    def root() -> str | None:
        return next(
            (span.trace for span in collector.spans if span.attributes.get("sparkd.request_id") == answer.headers["x-request-id"]), None
        )

    trace = until(root, "the gateway's span")
    until(lambda: any(span.trace == trace and span.name == "llm_request" for span in collector.spans), "the engine's span")
