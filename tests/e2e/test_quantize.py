"""End to end: a model that is quantized while it is loaded, by an engine whose environment has vLLM and nothing of sparkd."""

from __future__ import annotations

import time

from tests.daemon_process import DaemonProcess
from tests.e2e.conftest import START_S


def test_a_model_is_quantized_while_it_is_loaded_and_still_knows_the_capital(served: DaemonProcess) -> None:
    served.load("quantized")
    deadline_s, seen = time.monotonic() + START_S, []
    while served.model("quantized")["state"] not in ("READY", "FAILED") and time.monotonic() < deadline_s:
        seen.append(served.model("quantized")["progress"] or {})
        time.sleep(0.1)
    ended = served.model("quantized")
    assert ended["state"] == "READY", ended["message"]
    told = ended["progress"]
    assert "Paris" in served.chat("quantized", "What is the capital of France?").json()["choices"][0]["message"]["content"]
    assert (told["source"], told["format"], told["failure"]) == ("checkpoint", "int4-g64", None)
    assert told["bytes_done"] == told["bytes_total"] > 2**28
    assert told["units_done"] == told["units_total"] > 100
    assert any(0 < (one.get("bytes_done") or 0) < one["bytes_total"] for one in seen), "it was seen on its way"
    assert served.metric("sparkd_model_load_read_bytes", 'model="quantized"') >= told["bytes_total"]
    served.unload("quantized")
    served.wait_for("quantized", "STOPPED", 30)
