"""End to end: a model that is quantized while it is loaded, by an engine whose environment has vLLM and nothing of sparkd."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.daemon_process import DaemonProcess, until
from tests.e2e.conftest import START_S

NAME = "quantized"


@pytest.mark.timeout(900)
def test_a_model_is_quantized_while_it_is_loaded_and_the_second_start_only_reads(served: DaemonProcess) -> None:
    first, on_the_way = loaded(served)
    assert (first["source"], first["format"], first["failure"]) == ("checkpoint", "int4-g64", None)
    assert first["bytes_done"] == first["bytes_total"] > 2**28
    assert first["units_done"] == first["units_total"] > 100
    assert any(0 < (one.get("bytes_done") or 0) < one["bytes_total"] for one in on_the_way), "it was seen on its way"
    assert served.metric("sparkd_model_load_read_bytes", f'model="{NAME}"') >= first["bytes_total"]
    kept = until(lambda: written(served), 60, "the quantized cache")

    served.unload(NAME)
    served.wait_for(NAME, "STOPPED", 30)
    second, _ = loaded(served)
    assert (second["source"], second["failure"]) == ("cache", None)
    assert second["bytes_total"] < 0.6 * first["bytes_total"]
    assert second["read_bytes"] <= 1.03 * kept["cache_bytes"]
    served.unload(NAME)
    served.wait_for(NAME, "STOPPED", 30)


def loaded(served: DaemonProcess) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The progress once it still knows a capital, and what was seen of it before."""
    served.load(NAME)
    deadline_s, seen = time.monotonic() + START_S, []
    while served.model(NAME)["state"] not in ("READY", "FAILED") and time.monotonic() < deadline_s:
        seen.append(served.model(NAME)["progress"] or {})
        time.sleep(0.1)
    ended = served.model(NAME)
    assert ended["state"] == "READY", ended["message"]
    assert "Paris" in served.chat(NAME, "What is the capital of France?").json()["choices"][0]["message"]["content"]
    return ended["progress"], seen


def written(served: DaemonProcess) -> dict[str, Any] | None:
    known = served.model(NAME)["progress"]
    assert known["cache_state"] in ("writing", "written"), known["cache_why"]
    return dict(known) if known["cache_state"] == "written" else None
