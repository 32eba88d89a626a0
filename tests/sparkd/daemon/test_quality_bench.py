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
from tests.sparkd.daemon.test_benches import ended
from tests.support.daemon_process import DaemonProcess, daemon
from tests.support.waiting import until

KEY = "canary-of-the-boss-0123456789"
CONFIGURED = ["broken", "own", "quick", "slow"]
SECRET_TEXT = "canaryword " * 40


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("quality")
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    entry = {"model": str(model), "memory_gib": 1}
    slow = entry | {"env": {"SPARKD_STUB_FIRST_DELAY_S": "2"}}
    settings: dict[str, Any] = {
        "keys": {"admin": [f"boss: {KEY}"]},
        "engine": {"entrypoint": "workers.stub", "stop_timeout_s": 2},
        "models": {
            "quick": entry | {"preload": True, "quantize": "nvfp4"},
            "slow": slow,
            "broken": entry | {"env": {"SPARKD_STUB_EXIT_AT": "load"}},
            "own": entry | {"quantization": "fp8"},
        },
    }
    with daemon(folder, settings) as process:
        process.config.chmod(0o600)
        process.client.headers["authorization"] = f"Bearer {KEY}"
        process.wait_for("quick", "READY")
        yield process


def start(process: DaemonProcess, model: str = "quick", **body: Any) -> httpx.Response:
    return process.client.post("/admin/v1/bench", json={"model": model, "kind": "quality"} | body)


def names(process: DaemonProcess) -> list[str]:
    return sorted(model["name"] for model in process.get("/admin/v1/models")["models"])


def result_of(process: DaemonProcess, bench: str) -> dict[str, Any]:
    found: dict[str, Any] = process.get(f"/admin/v1/bench/{bench}")
    return found


@pytest.mark.timeout(300)
def test_the_format_of_the_entry_is_compared(running: DaemonProcess) -> None:
    started = start(running)
    assert started.status_code == 202, started.text
    end = ended(running, started.json()["operation"])
    assert end["state"] == "SUCCEEDED", end
    result = result_of(running, started.json()["bench"])
    assert result["text"] == text_label(SHIPPED, shipped_text())
    stored, format_ = result["quality"]
    assert (stored["format"], format_["format"]) == ("as stored", "nvfp4")
    assert (stored["kl"], stored["agreement"], stored["error"]) == (None, None, None)
    # The stub says the same in every format.
    assert (format_["kl"], format_["kl_p99"], format_["agreement"]) == (pytest.approx(0, abs=1e-9), pytest.approx(0, abs=1e-9), 1.0)
    assert format_["perplexity"] == stored["perplexity"] > 1
    assert format_["tokens"] > 400
    until(lambda: names(running) == CONFIGURED, "the lent models are forgotten")
    assert running.wait_for("quick", "READY")


@pytest.mark.timeout(300)
def test_a_format_that_does_not_load_is_a_row(running: DaemonProcess) -> None:
    started = start(running, "broken", formats=["fp8", "int4-g32"]).json()
    assert ended(running, started["operation"])["state"] == "SUCCEEDED"
    rows = result_of(running, started["bench"])["quality"]
    assert [row["format"] for row in rows] == ["as stored", "fp8", "int4-g32"]
    errors = [row["error"] for row in rows]
    assert all("CudaOutOfMemory" in error and error == one_line(error) for error in errors), errors
    assert all(row["perplexity"] is None for row in rows)
    row = next(row for row in running.get("/admin/v1/bench")["benches"] if row["id"] == started["bench"])
    assert (row["kind"], row["done"], row["cells"]) == ("quality", 0, 3)


@pytest.mark.timeout(300)
def test_a_cancelled_bench_keeps_its_rows_and_goes_on(running: DaemonProcess) -> None:
    started = start(running, "slow", formats=["fp8"], text=SECRET_TEXT, text_name="own.txt").json()
    until(lambda: [row for row in result_of(running, started["bench"])["quality"] if row["tokens"]], "a row")
    assert running.client.delete(f"/admin/v1/operations/{started['operation']}").status_code < 300
    until(lambda: result_of(running, started["bench"])["state"] == "cancelled", "the result is kept")
    until(lambda: names(running) == CONFIGURED, "the lent models are forgotten")
    rows = result_of(running, started["bench"])["quality"]
    assert rows[0]["perplexity"] and rows[1]["perplexity"] is None
    assert start(running, "slow", resume=started["bench"]).status_code == 400  # of another text
    again = start(running, "slow", text=SECRET_TEXT, resume=started["bench"])
    assert again.status_code == 202, again.text
    assert ended(running, again.json()["operation"])["state"] == "SUCCEEDED"
    result = result_of(running, started["bench"])
    assert result["quality"][1]["agreement"] == 1.0 and result["text"] == text_label("own.txt", SECRET_TEXT.strip())
    assert "canaryword" not in json.dumps(result) + running.tail()


def test_what_cannot_be_compared_is_refused(running: DaemonProcess, tmp_path_factory: pytest.TempPathFactory) -> None:
    for model, body, part in (
        ("nobody", {}, "nobody"),
        ("own", {}, "own way"),
        ("quick", {"formats": ["int3"]}, "int3"),
        ("quick", {"text": " ", "text_name": "empty.txt"}, "empty.txt"),
        ("quick", {"text": "word " * 8000, "text_name": "huge.txt"}, "huge.txt"),
    ):
        answer = start(running, model, **body)
        assert answer.status_code in (400, 404) and part in answer.json()["error"]["message"], answer.text
    folder = tmp_path_factory.mktemp("files")
    (key := folder / "key").write_text(KEY)
    (huge := folder / "huge.txt").write_text("word " * 8000)
    to = ["--url", running.url, "--key-file", str(key)]
    assert exit_code(["bench", "--quality", "quick", "--text", str(huge), *to]) == 2
    assert exit_code(["bench", "quick", "--formats", "fp8", *to]) == 2


@pytest.mark.timeout(300)
def test_a_daemon_that_is_killed_leaves_no_lent_model(running: DaemonProcess) -> None:
    start(running, "slow", formats=["fp8"])
    until(lambda: "slow.bench-as-stored" in names(running), "a lent model")
    running.wait_for("slow.bench-as-stored", "READY")
    running.kill()
    running.start()
    running.wait_for("quick", "READY")
    assert names(running) == CONFIGURED
