"""End to end: stock vLLM with our worker class sizes its cache by what the machine has left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon_process import ROOT
from tests.support.given_memory import SIZE_BYTES
from tests.support.kv_case import MAX_MODEL_LEN, MAX_NUM_SEQS
from workers.kv.load_watch import ERROR_BYTES

GIB = 2**30
MARGIN = SIZE_BYTES - 6 * GIB  # so that engine and cache, whose pages nobody writes, share 6 GiB
NOISE = GIB // 2  # that the engine's own processes take or give meanwhile


@dataclass(frozen=True)
class Start:
    """What an engine answered, the report of its sizing, and its log. folder: with its profiles."""

    folder: Path
    answer: dict[str, Any]
    report: dict[str, Any]
    log: str


def start(folder: Path, model: Path, requests: int = 2 * MAX_NUM_SEQS) -> Start:
    known = {"margin_bytes": MARGIN, "profiles": str(folder / "profiles"), "report": str(folder / "report")}
    env = os.environ | {
        "SPARKD_KV": json.dumps(known),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    case = json.dumps({"model": str(model), "requests": requests})
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kv_case"], input=case, env=env, cwd=ROOT, capture_output=True, text=True,
        start_new_session=True, check=False,
    )  # fmt: skip
    said = [line.removeprefix("kv_case ") for line in done.stdout.splitlines() if line.startswith("kv_case ")]
    assert said, done.stdout[-2000:] + done.stderr[-2000:]
    return Start(folder, json.loads(said[0]), json.loads((folder / "report").read_text()), done.stdout + done.stderr)


@pytest.fixture(scope="module")
def first_start(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    return start(tmp_path_factory.mktemp("sized"), chat_model)


def test_what_is_left_is_the_cache(first_start: Start) -> None:
    answer, first, log = first_start.answer, first_start.report, first_start.log
    assert (first["phase"], first["source"]) == ("ready", "rehearsal"), log[-3000:]
    # The pool is the reading, less the margin and what the largest batch needs.
    assert first["room_bytes"] - first["margin_bytes"] - 1.25 * first["peak_bytes"] - first["pool_bytes"] < NOISE
    assert 0 < first["pool_bytes"] < first["room_bytes"] - first["margin_bytes"]
    assert first["tokens"] == int(first["sequences"] * MAX_MODEL_LEN)
    assert 2**28 < first["weights_bytes"] < 2**31
    assert first["peak_bytes"] > 2**20
    # Real batches stay within what the rehearsal saw.
    assert 2**20 < first["load_peak_bytes"] < 1.25 * first["peak_bytes"] + ERROR_BYTES
    assert "peak_why" not in first
    # Everything that is admitted runs: twice as many of the longest prompts as run together.
    assert answer["prompts"] == [MAX_MODEL_LEN - 2] * 2 * MAX_NUM_SEQS
    assert answer["preempted"] == 0
    assert "Paris" in answer["answer"]


@pytest.mark.rest
def test_the_next_start_remembers_and_corrects_itself(first_start: Start, chat_model: Path) -> None:
    (profile,) = (first_start.folder / "profiles").glob("*.json")
    learned = json.loads(profile.read_text())
    learned["demand"]["graphs"] = GIB  # which no CPU has
    profile.write_text(json.dumps(learned))
    again = start(first_start.folder, chat_model, requests=1)
    second = again.report
    assert (second["phase"], second["source"]) == ("ready", "profile")
    assert second["error_bytes"] > GIB // 4
    assert "corrected" in again.log
    assert json.loads(profile.read_text())["demand"]["graphs"] < 3 * GIB // 4
    assert "Paris" in again.answer["answer"]
