"""End to end: the page of a daemon with real vLLM behind it passes `promtool check metrics`."""

from __future__ import annotations

from tests.e2e.conftest import NAME
from tests.support.daemon_process import DaemonProcess
from tests.support.observability import complaints_of
from tests.support.waiting import until


def test_promtool_takes_the_page_of_a_daemon_with_an_engine(served: DaemonProcess) -> None:
    served.chat(NAME, "What is the capital of France?")
    until(lambda: b"\nvllm:generation_tokens_total{" in served.client.get("/metrics").content, "the engine's series")

    assert complaints_of(served.client.get("/metrics").content) == []
