"""End to end: the cache is sized for every kind of attention that vLLM serves on a CPU, and for speculative decoding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.daemon_process import ROOT
from tests.support.facts import facts
from tests.support.kv_kinds_case import MAX_MODEL_LEN, MAX_NUM_SEQS, REFUSED, TWO_RANKS

# Those that differ in how a request takes blocks.
KINDS = ("sliding", "latent", "linear", "draft model", "n-gram")
# In this order: n-gram is the last (kv_kinds_case.py).
ORDER = [REFUSED, *KINDS[:-1], TWO_RANKS, KINDS[-1]]
POOL = 64 << 20
pytestmark = pytest.mark.rest


@dataclass(frozen=True)
class Kinds:
    """What one process with an engine of each kind, one after the other, says of each, and its log."""

    said: dict[str, dict[str, Any]]
    log: str


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    case = json.dumps({"folder": str(tmp_path_factory.mktemp("kinds")), "kinds": ORDER, "pool_bytes": POOL})
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_WAIT_POLICY": "PASSIVE", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kv_kinds_case"], input=case, env=env, cwd=ROOT, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    lines = [line.removeprefix("kv_kind ") for line in done.stdout.splitlines() if line.startswith("kv_kind ")]
    said = {one["kind"]: one for one in map(json.loads, lines)}
    assert list(said) == ORDER, done.stdout[-4000:]
    return Kinds(said, done.stdout)


def test_every_kind_of_attention_is_sized_and_serves_its_worst_load(kinds: Kinds) -> None:
    for kind in KINDS:
        one, report = kinds.said[kind], kinds.said[kind]["report"]
        assert (report["phase"], report["source"]) == ("ready", "limit"), one
        assert POOL * 0.95 < report["pool_bytes"] <= POOL, one
        # The number that vLLM itself reports, whatever the groups of layers are.
        assert report["tokens"] == one["tokens"], one
        assert abs(report["tokens"] * report["bytes_per_token"] / report["pool_bytes"] - 1) < 0.01, one
        assert report["sequences"] * MAX_MODEL_LEN == pytest.approx(report["tokens"], abs=1), one
        assert (one["finished"], one["preempted"]) == (2 * MAX_NUM_SEQS, 0), one
    per_token = {kind: kinds.said[kind]["report"]["bytes_per_token"] for kind in KINDS}
    # Two llamas of one size cost twice what one does.
    assert per_token["draft model"] == 2 * per_token["n-gram"]


def test_unequal_ranks_agree_and_the_smallest_decides(kinds: Kinds) -> None:
    """One of the two has less memory."""
    one, told = kinds.said[TWO_RANKS], kinds.said[TWO_RANKS]["told"]
    assert (one["finished"], one["preempted"]) == (2 * MAX_NUM_SEQS, 0)
    assert (told["phase"], told["ranks"], told["rank"], told["tokens"]) == ("ready", 2, 1, one["tokens"])
    assert [(rank["source"], rank["limited_by_other_rank"]) for rank in told["by_rank"]] == [("limit", True), ("limit", False)]
    assert facts(told["why"]).startswith("1 ")
    assert 0 < told["pool_bytes"] < POOL
    assert {rank["pool_bytes"] for rank in told["by_rank"]} == {told["pool_bytes"]}


def test_what_does_not_fit_is_refused_with_the_arithmetic(kinds: Kinds) -> None:
    report, sentence = kinds.said[REFUSED]["report"], kinds.said[REFUSED]["refused"]
    assert report["phase"] == "refused"
    assert report["why"] in kinds.log
    assert facts(sentence).startswith(f"{MAX_MODEL_LEN} ") and "margin" in sentence
