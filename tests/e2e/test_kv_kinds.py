"""End to end: the cache is sized by rehearsal for every kind of attention that vLLM serves on a CPU, and for speculative decoding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon_process import ROOT
from tests.kv_kinds_case import MAX_MODEL_LEN, MAX_NUM_SEQS

POOL = 64 << 20
# Of the case's kinds, those that differ in how a request takes blocks; the others are the first of them with other flags.
KINDS = ("sliding", "latent", "linear", "draft model", "n-gram")


@pytest.mark.timeout(600)
def test_every_kind_of_attention_is_sized_and_serves_its_worst_load(tmp_path: Path) -> None:
    env = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_NO_USAGE_STATS": "1",
    }
    case = json.dumps({"folder": str(tmp_path), "kinds": KINDS, "pool_bytes": POOL})
    command = [sys.executable, "-m", "tests.kv_kinds_case"]
    done = subprocess.run(command, input=case, env=env, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    said = [json.loads(line.removeprefix("kv_kind ")) for line in done.stdout.splitlines() if line.startswith("kv_kind ")]
    assert [one["kind"] for one in said] == list(KINDS), done.stdout[-2000:] + done.stderr[-2000:]
    for one in said:
        report = one["report"]
        assert (report["phase"], report["source"]) == ("ready", "rehearsal"), one
        assert report["peak_bytes"] > 0, one
        assert POOL * 0.95 < report["pool_bytes"] <= POOL, one
        # The number that vLLM itself reports, whatever the groups of layers are.
        assert report["tokens"] == one["tokens"], one
        assert abs(report["tokens"] * report["bytes_per_token"] / report["pool_bytes"] - 1) < 0.01, one
        assert report["sequences"] * MAX_MODEL_LEN == pytest.approx(report["tokens"], abs=1), one
        assert (one["finished"], one["preempted"]) == (2 * MAX_NUM_SEQS, 0), one
    per_token = {one["kind"]: one["report"]["bytes_per_token"] for one in said}
    # Two llamas of one size cost twice what one does.
    assert per_token["draft model"] == 2 * per_token["n-gram"]
