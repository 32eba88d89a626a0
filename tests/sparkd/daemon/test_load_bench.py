"""Loads of a real daemon with the stub engine, measured: until the first token, phase by phase, swaps and back; and what ends them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sparkd.__main__ import exit_code
from sparkd.bench.figures import WAYS, one_line
from tests.support.daemon_process import DaemonProcess, daemon
from tests.support.waiting import until


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("load-bench")
    entry = {"model": "owner/stub", "memory_gib": 1}
    settings: dict[str, Any] = {
        "engine": {"entrypoint": "workers.stub", "stop_timeout_s": 2},
        "backoff": {"initial_s": 60},
        "models": {
            "a": entry | {"preload": True},
            "b": entry | {"preload": True},
            "broken": entry | {"env": {"SPARKD_STUB_EXIT_AT": "start"}},
        },
    }
    with daemon(folder, settings) as process:
        for name in ("a", "b"):
            process.wait_for(name, "READY")
        yield process


def start(process: DaemonProcess, **body: Any) -> httpx.Response:
    return process.client.post("/admin/v1/bench", json={"model": "a", "kind": "load", "times": 1} | body)


def ended(process: DaemonProcess, operation: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        answer: dict[str, Any] = process.get(f"/admin/v1/operations/{operation}")
        return answer if answer["state"] != "RUNNING" else None

    return until(look, "the bench ended") or {}


def test_each_way_of_a_load_is_measured_and_each_model_is_as_before(running: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    begun = start(running, times=2).raise_for_status().json()
    assert ended(running, begun["operation"])["state"] == "SUCCEEDED"
    result = running.get(f"/admin/v1/bench/{begun['bench']}")

    assert [(row["way"], row["model"]) for row in result["loads"]] == [("first", "a")] * 2 + [("swap", "a"), ("back", "b")] * 2
    for row in result["loads"]:
        names = [phase["phase"] for phase in row["phases"]]
        assert ("unload" in names) == (row["way"] in ("swap", "back")) and "engine" in names
        assert 0 < row["seconds"] <= row["first_answer_s"] + 2
        # The phases are parts of the whole.
        assert sum(phase["seconds"] for phase in row["phases"]) <= row["seconds"] + 1
    until(lambda: all(running.model(name)["state"] == "READY" for name in ("a", "b")), "both are READY again")
    assert exit_code(["bench", "show", begun["bench"], "--url", running.url]) == 0
    assert WAYS["back"] in capsys.readouterr().out
    assert exit_code(["bench", "export", begun["bench"], "--format", "html", "--url", running.url]) == 0
    page = capsys.readouterr().out
    assert all(WAYS[row["way"]] in page for row in result["loads"])
    (row,) = (row for row in running.get("/admin/v1/bench")["benches"] if row["id"] == begun["bench"])
    assert (row["kind"], row["done"], row["cells"]) == ("load", 6, 6)


def test_a_cancelled_bench_keeps_its_loads_and_the_models_wishes(running: DaemonProcess) -> None:
    begun = start(running, times=50).raise_for_status().json()
    path = f"/admin/v1/bench/{begun['bench']}"
    until(lambda: running.get(path)["loads"], "the first load")
    assert running.client.delete(f"/admin/v1/operations/{begun['operation']}").status_code == 202
    until(lambda: running.get(path)["state"] == "cancelled", "it ended")
    assert running.get(path)["loads"]
    until(lambda: all(running.model(name)["state"] == "READY" for name in ("a", "b")), "both are READY again")


def test_a_model_that_does_not_load_ends_the_bench_with_its_reason(running: DaemonProcess) -> None:
    running.unload("b")
    running.wait_for("b", "STOPPED")
    begun = start(running, model="broken", other="a").raise_for_status().json()
    operation = ended(running, begun["operation"])
    assert operation["state"] == "FAILED" and "broken" in operation["message"]
    assert "EngineExited" in operation["message"] and operation["message"] == one_line(operation["message"])
    assert running.get(f"/admin/v1/bench/{begun['bench']}")["loads"] == []
    until(lambda: running.model("broken")["want"] == "STOPPED", "it is wanted as before")


def test_what_cannot_be_measured_is_refused(running: DaemonProcess) -> None:
    assert start(running, times=0).status_code == 400
    assert [start(running, other=other).json()["error"]["param"] for other in ("a", "unknown")] == ["other"] * 2
    # Both are loaded, so one would stay beside the bench.
    assert start(running, model="broken").status_code == 409
    assert start(running, resume="20260101-000000-a").status_code == 400
