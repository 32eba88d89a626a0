"""End to end: a model that is quantized while it is loaded, by an engine whose environment has vLLM and nothing of sparkd."""

from __future__ import annotations

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import START_S
from tests.support.daemon_process import DaemonProcess
from tests.support.waiting import until

NAME = "quantized"
QUESTION = "What is the capital of France?"
# The other engines of this part run beside these loads; the files after this one wait for them.
pytestmark = pytest.mark.usefixtures("kinds")


@pytest.mark.timeout(900)
def test_a_model_is_quantized_while_it_is_loaded_and_the_second_start_only_reads(served: DaemonProcess, foreign_python: Path) -> None:
    """A request starts it, in a runtime that has vLLM and not sparkd."""
    assert subprocess.run([str(foreign_python), "-c", "import sparkd"], capture_output=True, check=False, cwd="/").returncode != 0
    with ThreadPoolExecutor(1) as pool:
        body = {"model": NAME, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 16}
        answer = pool.submit(served.client.post, "/v1/chat/completions", json=body, timeout=START_S)
        until(lambda: served.model(NAME)["state"] != "STOPPED", "the request starts it")
        first, on_the_way = watched(served)
        assert "Paris" in answer.result().json()["choices"][0]["message"]["content"]
    assert served.model(NAME)["wanted_by"] == "request"
    assert (first["source"], first["format"], first["failure"]) == ("checkpoint", "int4-g64", None)
    assert first["bytes_done"] == first["bytes_total"] > 2**28
    assert first["units_done"] == first["units_total"] > 100
    assert any(0 < (one.get("bytes_done") or 0) < one["bytes_total"] for one in on_the_way), "it was seen on its way"
    assert served.metric("sparkd_model_load_read_bytes", f'model="{NAME}"') >= first["bytes_total"]
    kept = until(lambda: written(served), "the quantized cache")

    served.unload(NAME)
    served.wait_for(NAME, "STOPPED")
    served.load(NAME)
    second, _ = watched(served)
    assert (second["source"], second["failure"]) == ("cache", None)
    assert second["bytes_total"] < 0.6 * first["bytes_total"]
    assert second["read_bytes"] <= 1.03 * kept["cache_bytes"]
    served.unload(NAME)
    served.wait_for(NAME, "STOPPED")


def watched(served: DaemonProcess) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The progress once it still knows a capital, and what was seen of it before."""
    deadline_s, seen = time.monotonic() + START_S, []
    while served.model(NAME)["state"] not in ("READY", "FAILED") and time.monotonic() < deadline_s:
        seen.append(served.model(NAME)["progress"] or {})
        time.sleep(0.1)
    ended = served.model(NAME)
    assert ended["state"] == "READY", ended["message"]
    assert "Paris" in served.chat(NAME, QUESTION).json()["choices"][0]["message"]["content"]
    return ended["progress"], seen


def written(served: DaemonProcess) -> dict[str, Any] | None:
    known = served.model(NAME)["progress"]
    assert known["cache_state"] in ("writing", "written"), known["cache_why"]
    return dict(known) if known["cache_state"] == "written" else None
