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

GIB = 2**30
ASSUMED_BYTES = GIB // 2  # of a batch (workers/vllm/kv/cpu.py)
MARGIN = SIZE_BYTES - 6 * GIB  # so that engine and cache, whose pages nobody writes, share 6 GiB
NOISE = GIB // 2  # that the engine's own processes take or give meanwhile


@dataclass(frozen=True)
class Start:
    """An engine's answers, the report of its sizing, and its log."""

    answer: dict[str, Any]
    report: dict[str, Any]
    log: str


def start(folder: Path, model: Path) -> Start:
    known = {"margin_bytes": MARGIN, "report": str(folder / "report")}
    env = os.environ | {
        "SPARKD_KV": json.dumps(known),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    case = json.dumps({"model": str(model), "requests": 2 * MAX_NUM_SEQS})
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kv_case"], input=case, env=env, cwd=ROOT, capture_output=True, text=True,
        start_new_session=True, check=False,
    )  # fmt: skip
    said = [line.removeprefix("kv_case ") for line in done.stdout.splitlines() if line.startswith("kv_case ")]
    assert said, done.stdout[-2000:] + done.stderr[-2000:]
    return Start(json.loads(said[0]), json.loads((folder / "report").read_text())["cache"], done.stdout + done.stderr)


@pytest.fixture(scope="module")
def first_start(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    return start(tmp_path_factory.mktemp("sized"), chat_model)


def test_what_is_left_is_the_cache(first_start: Start) -> None:
    answer, first, log = first_start.answer, first_start.report, first_start.log
    assert (first["phase"], first["source"]) == ("ready", "limit"), log[-3000:]
    # The pool is the reading, less the margin and what a batch is assumed to need.
    assert 0 <= first["room_bytes"] - first["margin_bytes"] - int(1.25 * ASSUMED_BYTES) - first["pool_bytes"] < 2**24
    assert abs(first["error_bytes"]) < NOISE
    assert first["tokens"] == int(first["sequences"] * MAX_MODEL_LEN)
    # Everything that is admitted runs: twice as many of the longest prompts as run together.
    assert answer["prompts"] == [MAX_MODEL_LEN - 2] * 2 * MAX_NUM_SEQS
    assert answer["preempted"] == 0
    assert "Paris" in answer["answer"]
