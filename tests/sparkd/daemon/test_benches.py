"""Benches of a real daemon with the stub engine and the real llama-benchy: cells, counters, a kill, a cancel and going on, refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sparkd.__main__ import exit_code
from sparkd.bench.benchy import chosen_text
from sparkd.bench.figures import one_line
from sparkd.bench.result import text_label
from tests.support.daemon_process import ROOT, DaemonProcess, daemon
from tests.support.waiting import until

KEY = "canary-of-the-boss-0123456789"
TOKENIZER = ROOT / ".sparkd" / "models" / "SmolLM2-135M-Instruct"
COMMON = "skip_coherence: true, latency_mode: none, runs: 1"
PROFILE = f"""args: {{pp: 32, tg: 8, depth: [0, 64], concurrency: [1, 2], {COMMON}, extra_body: ['stub={{"chunk_interval_s":0.02}}']}}"""
BOOK = "Call me Ishmael. Some years ago - never mind how long precisely - I had little money in my purse.\r\n" * 99
# An answer of the stub takes seconds.
SLOW = f"""
args: {{pp: 32, tg: 8, concurrency: [1, 1], adapt_prompt: false, no_warmup: true, {COMMON}, extra_body: ['stub={{"chunk_interval_s":1}}']}}
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("benches")
    model = folder / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(TOKENIZER / name, model)
    entry = {"model": str(model), "memory_gib": 1, "env": {"HF_TOKEN": "hf_canary0123456789"}}
    settings: dict[str, Any] = {
        "keys": {"admin": [f"boss: {KEY}"]},
        "engine": {"entrypoint": "workers.stub", "stop_timeout_s": 2},
        "models": {"quick": entry | {"preload": True, "aliases": ["gpt"]}, "late": entry | {"env": {"SPARKD_STUB_START_DELAY_S": "60"}}},
    }
    with daemon(folder, settings) as process:
        process.config.chmod(0o600)
        process.client.headers["authorization"] = f"Bearer {KEY}"
        process.wait_for("quick", "READY")
        yield process


def start(process: DaemonProcess, **body: Any) -> httpx.Response:
    return process.client.post("/admin/v1/bench", json={"model": "quick", "profile": "mine", "profile_text": PROFILE} | body)


def ended(process: DaemonProcess, operation: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        answer: dict[str, Any] = process.get(f"/admin/v1/operations/{operation}")
        return answer if answer["state"] != "RUNNING" else None

    return until(look, "the bench ended") or {}


@pytest.mark.timeout(300)
def test_cells_are_measured_and_counted(running: DaemonProcess) -> None:
    tokens = running.chat("quick", "How long are you?", max_tokens=8).json()["usage"]["completion_tokens"]
    started = start(running)
    assert started.status_code == 202, started.text
    assert start(running).json()["error"]["code"] == "conflict"
    end = ended(running, started.json()["operation"])
    assert end["state"] == "SUCCEEDED", end
    result = running.get(f"/admin/v1/bench/{started.json()['bench']}")
    assert [cell["state"] for cell in result["cells"]] == ["done"] * 4
    assert [len(cell["rows"]) for cell in result["cells"]] == [1, 1, 2, 2]
    for cell in result["cells"]:
        place, row = cell["cell"], cell["rows"][-1]
        assert (row["prompt_size"], row["concurrency"], row["context_size"]) == (32, place["concurrency"], place["depth"])
        assert row["tg_throughput"]["mean"] > 0
        requests = place["concurrency"] * len(cell["rows"])
        assert cell["output_tokens"] == tokens * requests
        # The engine is asked when the first request has begun, and the stub has its first token at once.
        assert 0 <= tokens * requests - cell["engine"]["output_tokens"] <= place["concurrency"]
    assert (result["subject"]["model"], result["state"], result["tool"][:12]) == ("quick", "done", "llama-benchy")
    assert "canary" not in json.dumps(result)
    (row,) = running.get("/admin/v1/bench")["benches"]
    assert (row["id"], row["done"], row["cells"]) == (result["id"], 4, 4)
    text, name = chosen_text()
    assert result["text"] == name
    assert {path.read_text() for path in (running.state_dir / "bench" / ".cache" / "llama-benchy").glob("*.txt")} >= {text}


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_vllms_own_benchmark_measures_the_same_cells(running: DaemonProcess) -> None:
    begun = start(running, tool="vllm", profile_text=f"args: {{pp: 32, tg: 8, concurrency: [1, 2], {COMMON}}}").raise_for_status().json()
    assert ended(running, begun["operation"])["state"] == "SUCCEEDED"
    result = running.get(f"/admin/v1/bench/{begun['bench']}")

    assert result["tool"].startswith("vllm ") and [cell["state"] for cell in result["cells"]] == ["done"] * 2
    for cell, requests in zip(result["cells"], (1, 2), strict=True):
        (row,) = cell["rows"]
        assert len(row["e2e_ttft"]["values"]) == requests and row["tg_throughput"]["mean"] > 0
        assert cell["prompt_tokens"] >= 32 * requests and cell["engine"]["output_tokens"] == cell["output_tokens"] > 0


def test_a_bench_is_cancelled_and_goes_on(running: DaemonProcess) -> None:
    started = start(running, profile_text=SLOW, book=BOOK, book_name="moby.txt").json()

    def in_flight() -> bool:
        return bool(running.get("/admin/v1/requests?state=in_flight")["in_flight"])

    until(in_flight, "a request of the bench")
    busy = start(running, force=True)
    assert (busy.status_code, busy.json()["error"]["code"]) == (409, "conflict")
    children = [pid for pid in os.listdir("/proc") if pid.isdigit() and b"benchy_program" in _command(pid)]
    assert children and all(KEY.encode() not in _command(pid) for pid in children)
    assert running.client.delete(f"/admin/v1/operations/{started['operation']}").status_code < 300
    assert ended(running, started["operation"])["state"] == "CANCELLED"
    until(lambda: not any(_command(pid) for pid in children), "llama-benchy ended")
    path = f"/admin/v1/bench/{started['bench']}"
    until(lambda: running.get(path)["state"] == "cancelled", "the result is kept")
    assert running.get(path)["cells"][0]["state"] != "done"
    for other in ({"profile": "other"}, {"book": "Call me Ishmael. " * 60}, {"profile_text": PROFILE}):
        refused = start(running, **{"profile_text": SLOW, "resume": started["bench"]} | other)
        assert (refused.status_code, started["bench"] in refused.json()["error"]["message"]) == (400, True)
    until(lambda: not running.get("/admin/v1/requests?state=in_flight")["in_flight"], "no request is left")
    again = start(running, profile_text=SLOW, resume=started["bench"])
    assert again.status_code == 202, again.text
    end = ended(running, again.json()["operation"])
    assert end["state"] == "SUCCEEDED", end
    result = running.get(f"/admin/v1/bench/{started['bench']}")
    assert [cell["state"] for cell in result["cells"]] == ["done", "done"]
    # It went on without being given its text again.
    assert result["text"] == text_label("moby.txt", BOOK)


def _command(pid: str) -> bytes:
    try:
        return Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.timeout(300)
def test_an_engine_that_is_killed_costs_one_cell(running: DaemonProcess, tmp_path: Path) -> None:
    key, profile = tmp_path / "key", tmp_path / "my profiles" / "mine.yaml"
    key.write_text(KEY)
    profile.parent.mkdir()
    profile.write_text(SLOW)
    to = ["--url", running.url, "--key-file", str(key)]
    words = [sys.executable, "-m", "sparkd", "bench", "quick", "--profile", str(profile), *to]
    command = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    until(lambda: running.get("/admin/v1/requests?state=in_flight")["in_flight"], "a request of the bench")
    os.kill(running.pid_of("quick"), signal.SIGKILL)
    out, err = command.communicate(timeout=240)
    result = running.get(f"/admin/v1/bench/{running.get('/admin/v1/bench')['benches'][0]['id']}")
    assert (command.returncode, [cell["state"] for cell in result["cells"]]) == (1, ["failed", "done"]), (out, err)
    error = result["cells"][0]["error"]
    assert "EngineExited" in error and error == one_line(error) and error in out
    assert f"--profile '{profile}' --resume {result['id']}" in err
    running.wait_for("quick", "READY")


def test_what_cannot_be_measured_is_refused(running: DaemonProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for body, status in (
        ({"model": "nobody"}, 404),
        ({"profile": "no-such", "profile_text": None}, 400),
        ({"profile_text": "args: {depth: -1}"}, 400),
        ({"resume": "20200101-000000-x"}, 404),
        ({"resume": "../../etc/passwd"}, 404),
    ):
        answer = start(running, **body)
        assert (answer.status_code // 100, answer.status_code == status or answer.status_code == 422) == (4, True), answer.text
    key = tmp_path / "key"
    key.write_text(KEY)
    assert exit_code(["bench", "quick", "--profile", "/no/such.yaml", "--url", running.url, "--key-file", str(key)]) == 2
    assert "/no/such.yaml" in capsys.readouterr().err
    assert exit_code(["bench", "ls", "--json", "--url", running.url, "--key-file", str(key)]) == 0
    assert json.loads(capsys.readouterr().out)["benches"]


def test_results_are_compared_and_exported(running: DaemonProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(KEY)
    to = ["--url", running.url, "--key-file", str(key)]
    rows = running.get("/admin/v1/bench")["benches"]
    whole = next(row["id"] for row in rows if row["done"] == row["cells"] == 4)
    half = next(row["id"] for row in rows if row["done"] < row["cells"])
    assert exit_code(["bench", "compare", whole, whole, "--fail-over", "5%", *to]) == 0
    assert capsys.readouterr().out
    assert exit_code(["bench", "compare", whole, whole, "--json", *to]) == 0
    assert {change["relative"] or 0.0 for change in json.loads(capsys.readouterr().out)["changes"]} == {0.0}
    assert exit_code(["bench", "show", whole, *to]) == 0
    assert f"text: {running.get(f'/admin/v1/bench/{whole}')['text']}\n" in capsys.readouterr().out
    assert exit_code(["bench", "compare", whole, "20200101-000000-x", *to]) == 5
    assert exit_code(["bench", "compare", whole, half, "--fail-over", "much", *to]) == 2
    capsys.readouterr()
    for form, start in (("md", "| model"), ("csv", "model,test_name"), ("figures", ""), ("json", "{")):
        assert exit_code(["bench", "export", whole, "--format", form, *to]) == 0
        assert capsys.readouterr().out.startswith(start)
    report = tmp_path / "report.html"
    assert exit_code(["bench", "export", whole, half, "--format", "html", "-o", str(report), *to]) == 0
    assert "<svg" in report.read_text() and "canary" not in report.read_text()
    assert exit_code(["bench", "export", whole, half, "--format", "md", *to]) == 2
    assert exit_code(["bench", "export", whole, "--format", "pdf", *to]) == 2
    assert exit_code(["bench", "export", whole, "-o", "/no/such/folder/x", *to]) == 2


def test_a_bench_that_goes_on_keeps_its_samples(running: DaemonProcess) -> None:
    half = next(row["id"] for row in running.get("/admin/v1/bench")["benches"] if row["done"] < row["cells"])
    earlier = running.get(f"/admin/v1/bench/{half}")
    begun = start(running, profile_text=SLOW, resume=half).raise_for_status().json()
    assert ended(running, begun["operation"])["state"] == "SUCCEEDED"
    result = running.get(f"/admin/v1/bench/{half}")

    assert [cell["state"] for cell in result["cells"]] == ["done"] * 2 and result["cells"][1] == earlier["cells"][1]
    kept = len(earlier["samples"])
    assert kept and result["samples"][:kept] == earlier["samples"] and len(result["samples"]) > kept


def test_a_result_is_removed(running: DaemonProcess) -> None:
    bench_id = running.get("/admin/v1/bench")["benches"][-1]["id"]
    assert running.client.delete(f"/admin/v1/bench/{bench_id}").status_code == 200
    assert running.client.delete(f"/admin/v1/bench/{bench_id}").status_code == 404
