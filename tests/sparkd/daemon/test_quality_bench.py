"""Quality benches of a real daemon with the stub engine: rows, a format that fails, a cancel and going on, refusals, models that return."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sparkd.__main__ import exit_code
from sparkd.bench.figures import one_line
from sparkd.bench.passages import SHIPPED, shipped_text
from sparkd.bench.result import text_label
from sparkd.errors import BadRequest
from tests.support.stage import ADMIN_KEY, Stage
from tests.support.waiting import until

pytestmark = pytest.mark.rest

CONFIGURED = ["broken", "held", "own", "plain", "quick"]
FORMATS = ["fp8", "int4-g32", "nvfp4", "mxfp4"]
SECRET_TEXT = "canaryword " * 40


@pytest.fixture(scope="module", autouse=True)
def _models(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    model = tmp_path_factory.mktemp("quality") / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    models: dict[str, dict[str, Any]] = {
        "quick": {"preload": True, "quantize": "nvfp4"},
        "plain": {},
        "held": {"env": {"SPARKD_STUB_LOAD_GATE": str(stage.gate("never"))}},
        "broken": {"env": {"SPARKD_STUB_EXIT_AT": "load"}},
        "own": {"quantization": "fp8"},
    }
    with stage.serving({name: stage.entry(model=str(model), **keys) for name, keys in models.items()}):
        stage.ready("quick")
        yield


def start(stage: Stage, model: str = "quick", **body: Any) -> httpx.Response:
    return stage.client.post("/admin/v1/bench", json={"model": model, "kind": "quality"} | body)


def names(stage: Stage) -> list[str]:
    return sorted(model["name"] for model in stage.get("/admin/v1/models")["models"])


def result_of(stage: Stage, bench: str) -> dict[str, Any]:
    found: dict[str, Any] = stage.get(f"/admin/v1/bench/{bench}")
    return found


def test_the_format_of_the_entry_is_compared(stage: Stage) -> None:
    started = start(stage)
    assert started.status_code == 202, started.text
    end = stage.ended(started.json()["operation"])
    assert end["state"] == "SUCCEEDED", end
    result = result_of(stage, started.json()["bench"])
    assert result["text"] == text_label(SHIPPED, shipped_text())
    stored, format_ = result["quality"]
    assert (stored["format"], format_["format"]) == ("as stored", "nvfp4")
    assert (stored["kl"], stored["agreement"], stored["error"]) == (None, None, None)
    # The stub says the same in every format.
    assert (format_["kl"], format_["kl_p99"], format_["agreement"]) == (pytest.approx(0, abs=1e-9), pytest.approx(0, abs=1e-9), 1.0)
    assert format_["perplexity"] == stored["perplexity"] > 1
    assert format_["tokens"] > 400
    until(lambda: names(stage) == CONFIGURED, "the lent models are forgotten")
    assert stage.wait_for("quick", "READY")


def test_a_format_that_does_not_load_is_a_row(stage: Stage) -> None:
    started = start(stage, "broken", formats=["fp8", "int4-g32"]).json()
    assert stage.ended(started["operation"])["state"] == "SUCCEEDED"
    rows = result_of(stage, started["bench"])["quality"]
    assert [row["format"] for row in rows] == ["as stored", "fp8", "int4-g32"]
    errors = [row["error"] for row in rows]
    assert all("CudaOutOfMemory" in error and error == one_line(error) for error in errors), errors
    assert all(row["perplexity"] is None for row in rows)
    row = next(row for row in stage.get("/admin/v1/bench")["benches"] if row["id"] == started["bench"])
    assert (row["kind"], row["done"], row["cells"]) == ("quality", 0, 3)


def test_a_cancelled_bench_keeps_its_rows_and_goes_on(stage: Stage) -> None:
    started = start(stage, "plain", formats=FORMATS, text=SECRET_TEXT, text_name="own.txt").json()
    until(lambda: [row for row in result_of(stage, started["bench"])["quality"] if row["tokens"]], "a row")
    assert stage.client.delete(f"/admin/v1/operations/{started['operation']}").status_code < 300
    until(lambda: result_of(stage, started["bench"])["state"] == "cancelled", "the result is kept")
    until(lambda: names(stage) == CONFIGURED, "the lent models are forgotten")
    rows = result_of(stage, started["bench"])["quality"]
    assert rows[0]["perplexity"] and rows[-1]["perplexity"] is None
    assert start(stage, "plain", resume=started["bench"]).status_code == 400  # of another text
    again = start(stage, "plain", text=SECRET_TEXT, resume=started["bench"])
    assert again.status_code == 202, again.text
    assert stage.ended(again.json()["operation"])["state"] == "SUCCEEDED"
    result = result_of(stage, started["bench"])
    assert [row["agreement"] for row in result["quality"][1:]] == [1.0] * 4 and result["text"] == text_label("own.txt", SECRET_TEXT.strip())
    assert "canaryword" not in json.dumps(result) + stage.tail()


def test_what_cannot_be_compared_is_refused(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> None:
    for model, body, part in (
        ("nobody", {}, "nobody"),
        ("own", {}, "own way"),
        ("quick", {"formats": ["int3"]}, "int3"),
        ("quick", {"text": " ", "text_name": "empty.txt"}, "empty.txt"),
        ("quick", {"text": "word " * 8000, "text_name": "huge.txt"}, "huge.txt"),
    ):
        answer = start(stage, model, **body)
        assert answer.status_code in (400, 404) and part in answer.json()["error"]["message"], answer.text
    assert stage.client.post("/admin/v1/bench/copy", json={"model": "quick", "format": "fp8"}).status_code == 409
    folder = tmp_path_factory.mktemp("files")
    (key := folder / "key").write_text(ADMIN_KEY)
    (huge := folder / "huge.txt").write_text("word " * 8000)
    to = ["--url", stage.url, "--key-file", str(key)]
    assert exit_code(["bench", "--quality", "quick", "--text", str(huge), *to]) == BadRequest.exit_code
    assert exit_code(["bench", "quick", "--formats", "fp8", *to]) == 2


def test_a_daemon_that_is_killed_leaves_no_lent_model(stage: Stage) -> None:
    start(stage, "held", formats=["fp8"])
    until(lambda: stage.model("held.bench-as-stored").get("ranks"), "a lent model loads")
    stage.kill()
    stage.start()
    stage.settled()
    stage.ray_connected()
    stage.wait_for("quick", "READY")
    assert names(stage) == CONFIGURED
