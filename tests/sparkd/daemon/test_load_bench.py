"""Loads of a real daemon with the stub engine, measured: until the first token, phase by phase, swaps and back; and what ends them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sparkd.__main__ import exit_code
from sparkd.bench.figures import WAYS, one_line
from tests.support.stage import ADMIN_KEY, Stage
from tests.support.waiting import until

pytestmark = pytest.mark.rest


@pytest.fixture(scope="module")
def _models(stage: Stage) -> Iterator[None]:
    models = {"a": stage.entry(), "b": stage.entry(), "broken": stage.entry(env={"SPARKD_STUB_EXIT_AT": "start"})}
    # A load that failed is not tried again while a bench tells of it.
    with stage.serving(models, backoff={"initial_s": 3600, "max_s": 3600}):
        yield


@pytest.fixture
def running(stage: Stage, _models: None) -> Stage:
    """Both models are READY, as they must be after each bench."""
    for name in ("a", "b"):
        stage.ready(name)
    return stage


def start(process: Stage, **body: Any) -> httpx.Response:
    return process.client.post("/admin/v1/bench", json={"model": "a", "kind": "load", "times": 1} | body)


def test_each_way_of_a_load_is_measured_and_each_model_is_as_before(
    running: Stage, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text(ADMIN_KEY)
    to = ["--url", running.url, "--key-file", str(key)]
    begun = start(running, times=2).raise_for_status().json()
    assert running.ended(begun["operation"])["state"] == "SUCCEEDED"
    result = running.get(f"/admin/v1/bench/{begun['bench']}")

    assert [(row["way"], row["model"]) for row in result["loads"]] == [("first", "a")] * 2 + [("swap", "a"), ("back", "b")] * 2
    for row in result["loads"]:
        names = [phase["phase"] for phase in row["phases"]]
        assert ("unload" in names) == (row["way"] in ("swap", "back")) and "engine" in names
        assert row["seconds"] > 0 and row["first_answer_s"] > 0
    until(lambda: all(running.model(name)["state"] == "READY" for name in ("a", "b")), "both are READY again")
    assert exit_code(["bench", "show", begun["bench"], *to]) == 0
    assert WAYS["back"] in capsys.readouterr().out
    assert exit_code(["bench", "export", begun["bench"], "--format", "html", *to]) == 0
    assert begun["bench"] in capsys.readouterr().out
    (row,) = (row for row in running.get("/admin/v1/bench")["benches"] if row["id"] == begun["bench"])
    assert (row["kind"], row["done"], row["cells"]) == ("load", 6, 6)


def test_a_cancelled_bench_keeps_its_loads_and_the_models_wishes(running: Stage) -> None:
    begun = start(running, times=50).raise_for_status().json()
    path = f"/admin/v1/bench/{begun['bench']}"
    until(lambda: running.get(path)["loads"], "the first load")
    assert running.client.delete(f"/admin/v1/operations/{begun['operation']}").status_code == 202
    until(lambda: running.get(path)["state"] == "cancelled", "it ended")
    assert running.get(path)["loads"]
    until(lambda: all(running.model(name)["state"] == "READY" for name in ("a", "b")), "both are READY again")


def test_a_model_that_does_not_load_ends_the_bench_with_its_reason(running: Stage) -> None:
    running.unload("b")
    running.wait_for("b", "STOPPED")
    begun = start(running, model="broken", other="a").raise_for_status().json()
    operation = running.ended(begun["operation"])
    assert operation["state"] == "FAILED" and "broken" in operation["message"]
    assert "EngineExited" in operation["message"] and operation["message"] == one_line(operation["message"])
    assert running.get(f"/admin/v1/bench/{begun['bench']}")["loads"] == []
    until(lambda: running.model("broken")["want"] == "STOPPED", "it is wanted as before")


def test_what_cannot_be_measured_is_refused(running: Stage) -> None:
    assert start(running, times=0).status_code == 400
    assert [start(running, other=other).json()["error"]["param"] for other in ("a", "unknown")] == ["other"] * 2
    # Both are loaded, so one would stay beside the bench.
    assert start(running, model="broken").status_code == 409
    assert start(running, resume="20260101-000000-a").status_code == 400
