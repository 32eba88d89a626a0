"""A client's traceparent and tracestate are read as W3C Trace Context has them, and a malformed one is as none."""

from __future__ import annotations

import pytest

from sparkd.gateway.trace_context import Parent, forwarded, parent_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{SPAN}-01"
PARENT = Parent(int(TRACE, 16), int(SPAN, 16), True, "")


@pytest.mark.parametrize(
    ("sent", "sampled"),
    [
        (SAMPLED, True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f" {SAMPLED}\t", True),
        (f"cc-{TRACE}-{SPAN}-01-what-comes-later", True),
    ],
)
def test_a_clients_span(sent: str, sampled: bool) -> None:
    parent = parent_of([(b"traceparent", sent.encode())])

    assert parent == Parent(PARENT.trace_id, PARENT.span_id, sampled, "")


@pytest.mark.parametrize(
    "sent",
    [
        "",
        f"ff-{TRACE}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01.more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-0g",
    ],
)
def test_a_malformed_one_is_as_none(sent: str) -> None:
    assert parent_of([(b"traceparent", sent.encode()), (b"tracestate", b"a=1")]) is None


def test_two_of_them_are_as_none() -> None:
    assert parent_of([(b"traceparent", SAMPLED.encode())] * 2) is None
    assert parent_of([]) is None


def test_the_states_of_several_headers_are_one() -> None:
    parent = parent_of([(b"tracestate", b"a=1"), (b"traceparent", SAMPLED.encode()), (b"tracestate", b"b=2")])

    assert parent is not None
    assert parent.state == "a=1,b=2"


@pytest.mark.parametrize(("continued", "states"), [(True, [(b"tracestate", b"a=1")]), (False, [])])
def test_the_engine_gets_this_span_and_the_state_of_a_trace_that_goes_on(continued: bool, states: list[tuple[bytes, bytes]]) -> None:
    sent = [(b"accept", b"*/*"), (b"traceparent", b"junk"), (b"tracestate", b"a=1")]

    got = forwarded(sent, 0xAB, 0xCD, True, continued=continued)

    assert got == [(b"accept", b"*/*"), *states, (b"traceparent", b"00-" + b"0" * 30 + b"ab-" + b"0" * 14 + b"cd-01")]
    assert forwarded([], 1, 2, False, continued=False)[0][1].endswith(b"-00")
