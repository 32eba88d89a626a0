"""Benches of a real daemon with the stub engine and the real llama-benchy: cells, counters, a kill, a cancel and going on, refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from sparkd.__main__ import exit_code
from sparkd.bench.benchy import MADE_UP, made_up
from sparkd.bench.figures import one_line
from sparkd.bench.result import text_label
from tests.support.daemon_process import ROOT
from tests.support.processes import alive
from tests.support.stage import ADMIN_KEY, Stage
from tests.support.waiting import until

pytestmark = pytest.mark.rest

TOKENIZER = ROOT / ".sparkd" / "models" / "SmolLM2-135M-Instruct"
COMMON = "skip_coherence: true, latency_mode: none, runs: 1"
# Tokens that all come at once have no rate.
PACED = """extra_body: ['stub={"chunk_interval_s":0.02}']"""
PROFILE = f"args: {{pp: 32, tg: 8, depth: [0, 64], concurrency: [1, 2], {COMMON}, {PACED}}}"
BOOK = "Call me Ishmael. Some years ago - never mind how long precisely - I had little money in my purse.\r\n" * 99


def held_profile(gate: Path) -> str:
    """Two cells, whose answers wait for the gate."""
    extra = f"""extra_body: ['stub={{"gate":"{gate}"}}']"""
    return f"args: {{pp: 32, tg: 8, concurrency: [1, 1], adapt_prompt: false, no_warmup: true, {COMMON}, {extra}}}"


@pytest.fixture(scope="module", autouse=True)
def _models(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    model = tmp_path_factory.mktemp("benches") / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(TOKENIZER / name, model)
    entry = stage.entry(model=str(model), env={"HF_TOKEN": "hf_canary0123456789"}, aliases=["gpt"])
    with stage.serving({"quick": entry}):
        stage.ready("quick")
        yield


def start(stage: Stage, **body: Any) -> httpx.Response:
    return stage.client.post("/admin/v1/bench", json={"model": "quick", "profile": "mine", "profile_text": PROFILE} | body)


def result_of(stage: Stage, bench_id: str) -> dict[str, Any]:
    return dict(stage.get(f"/admin/v1/bench/{bench_id}"))


def has_request(stage: Stage) -> bool:
    return bool(stage.get("/admin/v1/requests?state=in_flight")["in_flight"])


def program_of(stage: Stage) -> psutil.Process:
    """The bench's own."""
    assert stage.process is not None
    return next(child for child in psutil.Process(stage.process.pid).children() if "sparkd.bench" in child.cmdline())


@pytest.fixture
def to(stage: Stage, tmp_path: Path) -> list[str]:
    """What a command needs to reach the daemon."""
    key = tmp_path / "key"
    key.write_text(ADMIN_KEY)
    return ["--url", stage.url, "--key-file", str(key)]


@pytest.fixture(scope="module")
def whole(stage: Stage) -> dict[str, Any]:
    """The result of four cells."""
    started = start(stage).raise_for_status().json()
    assert stage.ended(started["operation"])["state"] == "SUCCEEDED"
    return result_of(stage, started["bench"])


@dataclass(frozen=True)
class Broken:
    """A command that measured while the engine was killed: how it ended, its profile, and the result."""

    code: int
    out: str
    err: str
    profile: Path
    result: dict[str, Any]


@pytest.fixture(scope="module")
def broken(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Broken:
    folder = tmp_path_factory.mktemp("my profiles")
    key, profile, gate = folder / "key", folder / "mine.yaml", folder / "gate"
    key.write_text(ADMIN_KEY)
    profile.write_text(held_profile(gate))
    words = [sys.executable, "-m", "sparkd", "bench", "quick", "--profile", str(profile), "--url", stage.url, "--key-file", str(key)]
    command = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    until(lambda: has_request(stage), "a request of the bench")
    os.kill(stage.pid_of("quick"), signal.SIGKILL)
    gate.touch()
    out, err = command.communicate()
    stage.wait_for("quick", "READY")
    return Broken(command.returncode, out, err, profile, result_of(stage, stage.get("/admin/v1/bench")["benches"][0]["id"]))


def test_cells_are_measured_and_counted(stage: Stage, whole: dict[str, Any]) -> None:
    tokens = stage.chat("quick", "How long are you?", max_tokens=8).json()["usage"]["completion_tokens"]
    assert [cell["state"] for cell in whole["cells"]] == ["done"] * 4
    assert [len(cell["rows"]) for cell in whole["cells"]] == [1, 1, 2, 2]
    for cell in whole["cells"]:
        place, row = cell["cell"], cell["rows"][-1]
        assert (row["prompt_size"], row["concurrency"], row["context_size"]) == (32, place["concurrency"], place["depth"])
        assert row["tg_throughput"]["mean"] > 0
        requests = place["concurrency"] * len(cell["rows"])
        assert (cell["output_tokens"], cell["others_tokens"]) == (tokens * requests, 0)
    assert (whole["subject"]["model"], whole["state"], whole["tool"][:12]) == ("quick", "done", "llama-benchy")
    assert "canary" not in json.dumps(whole)
    (row,) = (row for row in stage.get("/admin/v1/bench")["benches"] if row["id"] == whole["id"])
    assert (row["done"], row["cells"]) == (4, 4)
    assert whole["text"] == text_label(MADE_UP, made_up())


def test_a_bench_is_cancelled_goes_on_and_is_removed(stage: Stage, tmp_path: Path) -> None:
    profile = held_profile(tmp_path / "gate")
    started = start(stage, profile_text=profile, book=BOOK, book_name="moby.txt").json()
    bench_id = started["bench"]
    until(lambda: has_request(stage), "a request of the bench")
    busy = start(stage, force=True)
    assert (busy.status_code, busy.json()["error"]["code"]) == (409, "conflict")
    program = program_of(stage)
    children = [program, *program.children()]
    assert any("benchy_program" in word for child in children for word in child.cmdline())
    # Keys come by standard input: they are neither among the words nor in the environment.
    assert program.cmdline()[1:] == ["-P", "-m", "sparkd.bench"]
    assert not [name for child in children for name in child.environ() if "KEY" in name or "TOKEN" in name]
    assert not [word for child in children for word in child.cmdline() if "key" in word]
    assert stage.client.delete(f"/admin/v1/operations/{started['operation']}").status_code < 300
    assert stage.ended(started["operation"])["state"] == "CANCELLED"
    until(lambda: not any(alive(child.pid) for child in children), "llama-benchy ended")
    until(lambda: result_of(stage, bench_id)["state"] == "cancelled", "the result is kept")
    assert result_of(stage, bench_id)["cells"][0]["state"] != "done"
    same = {"profile_text": profile, "resume": bench_id, "book": BOOK}
    for other in ({"profile": "other"}, {"book": "Call me Ishmael. " * 60}, {"book": None}, {"profile_text": PROFILE}):
        refused = start(stage, **same | other)
        assert (refused.status_code, bench_id in refused.json()["error"]["message"]) == (400, True)
    until(lambda: not has_request(stage), "no request is left")
    (tmp_path / "gate").touch()
    again = start(stage, **same)
    assert again.status_code == 202, again.text
    end = stage.ended(again.json()["operation"])
    assert end["state"] == "SUCCEEDED", end
    result = result_of(stage, bench_id)
    assert [cell["state"] for cell in result["cells"]] == ["done", "done"]
    assert result["text"] == text_label("moby.txt", BOOK)
    assert [stage.client.delete(f"/admin/v1/bench/{bench_id}").status_code for _ in range(2)] == [200, 404]


def test_a_bench_whose_program_is_killed_has_failed_and_goes_on(stage: Stage, tmp_path: Path) -> None:
    profile = held_profile(tmp_path / "gate")
    started = start(stage, profile_text=profile).json()
    until(lambda: has_request(stage), "a request of the bench")
    program_of(stage).kill()
    operation = stage.ended(started["operation"])
    assert operation["state"] == "FAILED" and "-9" in operation["message"]
    assert result_of(stage, started["bench"])["state"] == "failed"
    until(lambda: not has_request(stage), "no request is left")
    (tmp_path / "gate").touch()
    again = start(stage, profile_text=profile, resume=started["bench"]).json()
    assert stage.ended(again["operation"])["state"] == "SUCCEEDED"
    assert [cell["state"] for cell in result_of(stage, started["bench"])["cells"]] == ["done"] * 2


def test_an_engine_that_is_killed_costs_one_cell(broken: Broken) -> None:
    assert (broken.code, [cell["state"] for cell in broken.result["cells"]]) == (1, ["failed", "done"]), (broken.out, broken.err)
    error = broken.result["cells"][0]["error"]
    assert "EngineExited" in error and error == one_line(error) and error in broken.out
    assert f"--profile '{broken.profile}' --resume {broken.result['id']}" in broken.err


def test_a_bench_that_goes_on_keeps_its_samples(stage: Stage, broken: Broken) -> None:
    begun = start(stage, profile_text=broken.profile.read_text(), resume=broken.result["id"]).raise_for_status().json()
    assert stage.ended(begun["operation"])["state"] == "SUCCEEDED"
    result = result_of(stage, broken.result["id"])

    assert [cell["state"] for cell in result["cells"]] == ["done"] * 2 and result["cells"][1] == broken.result["cells"][1]
    kept = len(broken.result["samples"])
    assert kept and result["samples"][:kept] == broken.result["samples"] and len(result["samples"]) > kept


def test_what_cannot_be_measured_is_refused(stage: Stage, to: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for body, status in (
        ({"model": "nobody"}, 404),
        ({"profile": "no-such", "profile_text": None}, 400),
        ({"profile_text": "args: {depth: -1}"}, 400),
        ({"resume": "20200101-000000-x"}, 404),
        ({"resume": "../../etc/passwd"}, 404),
    ):
        answer = start(stage, **body)
        assert (answer.status_code // 100, answer.status_code == status or answer.status_code == 422) == (4, True), answer.text
    assert exit_code(["bench", "quick", "--profile", "/no/such.yaml", *to]) == 2
    assert "/no/such.yaml" in capsys.readouterr().err


def test_results_are_compared_and_exported(
    stage: Stage, whole: dict[str, Any], broken: Broken, to: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, second = whole["id"], broken.result["id"]
    assert exit_code(["bench", "ls", "--json", *to]) == 0
    assert {row["id"] for row in json.loads(capsys.readouterr().out)["benches"]} >= {first, second}
    assert exit_code(["bench", "compare", first, first, "--fail-over", "5%", *to]) == 0
    assert capsys.readouterr().out
    assert exit_code(["bench", "compare", first, first, "--json", *to]) == 0
    assert {change["relative"] or 0.0 for change in json.loads(capsys.readouterr().out)["changes"]} == {0.0}
    assert exit_code(["bench", "show", first, *to]) == 0
    assert f"text: {whole['text']}\n" in capsys.readouterr().out
    assert exit_code(["bench", "compare", first, "20200101-000000-x", *to]) == 5
    assert exit_code(["bench", "compare", first, second, "--fail-over", "much", *to]) == 2
    capsys.readouterr()
    for form, begin in (("md", "| model"), ("json", "{")):
        assert exit_code(["bench", "export", first, "--format", form, *to]) == 0
        assert capsys.readouterr().out.startswith(begin)
    report = tmp_path / "report.html"
    assert exit_code(["bench", "export", first, second, "--format", "html", "-o", str(report), *to]) == 0
    assert second in report.read_text() and "canary" not in report.read_text()
    assert exit_code(["bench", "export", first, second, "--format", "md", *to]) == 2
    assert exit_code(["bench", "export", first, "--format", "csv", *to]) == 2
    assert exit_code(["bench", "export", first, "-o", "/no/such/folder/x", *to]) == 2
