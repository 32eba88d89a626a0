"""End to end: two models of which one fits take turns; the second is quantized while it loads, by an engine without sparkd's packages."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import NAME, QUANTIZED
from tests.support.daemon_process import DaemonProcess
from tests.support.waiting import until

QUESTION = "What is the capital of France?"
pytestmark = pytest.mark.xdist_group("served")


def test_two_models_take_turns_and_a_quantized_one_is_read_from_its_cache_the_second_time(
    served: DaemonProcess, foreign_python: Path
) -> None:
    assert subprocess.run([str(foreign_python), "-c", "import sparkd"], capture_output=True, check=False, cwd="/").returncode != 0

    knows_a_capital(served, QUANTIZED)
    assert (served.model(QUANTIZED)["wanted_by"], served.model(NAME)["state"]) == ("request", "STOPPED")
    first = served.model(QUANTIZED)["progress"]
    assert (first["source"], first["format"], first["failure"]) == ("checkpoint", "int4-g64", None)
    assert first["bytes_done"] == first["bytes_total"] > 2**28
    assert first["units_done"] == first["units_total"] > 100
    assert served.metric("sparkd_model_load_read_bytes", f'model="{QUANTIZED}"') >= first["bytes_total"]
    kept = until(lambda: written(served), "the quantized cache")

    served.unload(QUANTIZED)
    served.wait_for(QUANTIZED, "STOPPED")
    served.load(QUANTIZED)
    served.wait_for(QUANTIZED, "READY")
    second = served.model(QUANTIZED)["progress"]
    assert (second["source"], second["failure"]) == ("cache", None)
    assert second["bytes_total"] < 0.6 * first["bytes_total"]
    assert second["read_bytes"] <= 1.03 * kept["cache_bytes"]
    knows_a_capital(served, QUANTIZED)

    knows_a_capital(served, NAME)
    assert served.model(QUANTIZED)["state"] == "STOPPED"
    events = served.client.get("/admin/v1/events", params={"limit": 1000}).json()["events"]
    assert {NAME, QUANTIZED} <= {event["model"] for event in events if event["kind"] == "swap"}


def knows_a_capital(served: DaemonProcess, model: str) -> None:
    """A request starts the model, and is answered by it."""
    answer = served.chat(model, QUESTION).json()
    assert "Paris" in answer["choices"][0]["message"]["content"], answer


def written(served: DaemonProcess) -> dict[str, Any] | None:
    progress = served.model(QUANTIZED)["progress"]
    assert progress["cache_state"] in ("writing", "written"), progress["cache_why"]
    return dict(progress) if progress["cache_state"] == "written" else None
