"""End to end: of two models one fits, and gives way; the second is quantized while it loads, by an engine without sparkd's packages."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

from tests.e2e.conftest import NAME, QUANTIZED
from tests.support.daemon_process import DaemonProcess, alive
from tests.support.waiting import until
from workers.host.processes import descendants, table

QUESTION = "What is the capital of France?"


def test_a_model_gives_way_to_a_quantized_one_that_comes_back_from_its_cache_when_it_is_killed(
    served: DaemonProcess, foreign_python: Path
) -> None:
    assert subprocess.run([str(foreign_python), "-c", "import sparkd"], capture_output=True, check=False, cwd="/").returncode != 0

    knows_a_capital(served, QUANTIZED)
    assert (served.model(QUANTIZED)["wanted_by"], served.model(NAME)["state"]) == ("request", "STOPPED")
    assert told(served, "swap", NAME)
    first = served.model(QUANTIZED)["progress"]
    assert (first["source"], first["format"], first["failure"]) == ("checkpoint", "int4-g64", None)
    assert first["bytes_done"] == first["bytes_total"] > 2**28
    assert first["units_done"] == first["units_total"] > 100
    assert served.metric("sparkd_model_load_read_bytes", f'model="{QUANTIZED}"') >= first["bytes_total"]
    kept = until(lambda: written(served), "the quantized cache")

    # A killed engine core comes back by itself, from the cache.
    shim = served.pid_of(QUANTIZED)
    core = max(descendants([shim], table()), key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]))  # it holds the weights
    os.kill(core, signal.SIGKILL)
    until(lambda: served.model(QUANTIZED)["failures"] == 1, "the failure is seen")
    assert [re.search(r"its (?:engine core|worker \S+) was lost", message) is not None for message in told(served, "failed")] == [True]
    served.wait_for(QUANTIZED, "READY")
    assert served.pid_of(QUANTIZED) != shim
    assert not alive(core)
    second = served.model(QUANTIZED)["progress"]
    assert (second["source"], second["failure"]) == ("cache", None)
    assert second["bytes_total"] < 0.6 * first["bytes_total"]
    assert second["read_bytes"] <= 1.03 * kept["cache_bytes"]
    knows_a_capital(served, QUANTIZED)


def told(served: DaemonProcess, kind: str, model: str = QUANTIZED) -> list[str]:
    """The messages of a model's events of a kind."""
    events = served.client.get("/admin/v1/events", params={"limit": 1000}).json()["events"]
    return [event["message"] for event in events if (event["kind"], event["model"]) == (kind, model)]


def knows_a_capital(served: DaemonProcess, model: str) -> None:
    """A request starts the model, and is answered by it."""
    answer = served.chat(model, QUESTION).json()
    assert "Paris" in answer["choices"][0]["message"]["content"], answer


def written(served: DaemonProcess) -> dict[str, Any] | None:
    progress = served.model(QUANTIZED)["progress"]
    assert progress["cache_state"] in ("writing", "written"), progress["cache_why"]
    return dict(progress) if progress["cache_state"] == "written" else None
