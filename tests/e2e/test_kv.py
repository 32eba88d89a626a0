"""End to end: stock vLLM with our worker class sizes its cache by what the machine has left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
START_S = 240


def engine(folder: Path, model: Path, requests: int = 2 * MAX_NUM_SEQS) -> tuple[dict[str, Any], dict[str, Any], str]:
    """(what it answered, its report, its log)."""
    known = {"margin_bytes": MARGIN, "profiles": str(folder / "profiles"), "report": str(folder / "report")}
    env = os.environ | {
        "SPARKD_KV": json.dumps(known),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    case = json.dumps({"model": str(model), "requests": requests})
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kv_case"], input=case, env=env, cwd=ROOT, capture_output=True, text=True, timeout=START_S,
        start_new_session=True, check=False,
    )  # fmt: skip
    said = [line.removeprefix("kv_case ") for line in done.stdout.splitlines() if line.startswith("kv_case ")]
    assert said, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(said[0]), json.loads((folder / "report").read_text()), done.stdout + done.stderr


@pytest.mark.timeout(900)
def test_what_is_left_is_the_cache_and_the_next_start_remembers(tmp_path: Path, chat_model: Path) -> None:
    answer, first, log = engine(tmp_path, chat_model)
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

    (profile,) = (tmp_path / "profiles").glob("*.json")
    learned = json.loads(profile.read_text())
    learned["demand"]["graphs"] = GIB  # which no CPU has
    profile.write_text(json.dumps(learned))
    answer, second, log = engine(tmp_path, chat_model, requests=1)
    assert (second["phase"], second["source"]) == ("ready", "profile")
    assert second["error_bytes"] > GIB // 4
    assert "corrected" in log
    assert json.loads(profile.read_text())["demand"]["graphs"] < 3 * GIB // 4
    assert "Paris" in answer["answer"]
