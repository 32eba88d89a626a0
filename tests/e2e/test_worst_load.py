"""End to end: the cache is sized by rehearsal for every kind of attention that vLLM serves on a CPU, and for speculative decoding.

The engines run beside those of the tests before (conftest.py, `kinds`): this file is the last.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import KINDS, POOL, Kinds
from tests.support.facts import facts
from tests.support.kv_kinds_case import MAX_MODEL_LEN, MAX_NUM_SEQS, REFUSED, TWO_RANKS


@pytest.fixture(scope="module")
def said(kinds: Kinds) -> dict[str, dict[str, Any]]:
    return kinds.said()


@pytest.mark.timeout(600)
def test_every_kind_of_attention_is_sized_and_serves_its_worst_load(said: dict[str, dict[str, Any]]) -> None:
    for kind in KINDS:
        one, report = said[kind], said[kind]["report"]
        assert (report["phase"], report["source"]) == ("ready", "rehearsal"), one
        assert report["peak_bytes"] > 0, one
        assert POOL * 0.95 < report["pool_bytes"] <= POOL, one
        # The number that vLLM itself reports, whatever the groups of layers are.
        assert report["tokens"] == one["tokens"], one
        assert abs(report["tokens"] * report["bytes_per_token"] / report["pool_bytes"] - 1) < 0.01, one
        assert report["sequences"] * MAX_MODEL_LEN == pytest.approx(report["tokens"], abs=1), one
        assert (one["finished"], one["preempted"]) == (2 * MAX_NUM_SEQS, 0), one
    per_token = {kind: said[kind]["report"]["bytes_per_token"] for kind in KINDS}
    # Two llamas of one size cost twice what one does.
    assert per_token["draft model"] == 2 * per_token["n-gram"]


@pytest.mark.timeout(600)
def test_unequal_ranks_agree_and_the_smallest_decides(said: dict[str, dict[str, Any]]) -> None:
    """One of the two has a profile, the other has not and less memory: a rehearsal by one alone would wait for ever."""
    one, told = said[TWO_RANKS], said[TWO_RANKS]["told"]
    assert (one["finished"], one["preempted"]) == (2 * MAX_NUM_SEQS, 0)
    assert (told["phase"], told["ranks"], told["rank"], told["tokens"]) == ("ready", 2, 1, one["tokens"])
    assert facts(told["source_why"]) == "1"
    assert [(rank["source"], rank["limited_by_other_rank"]) for rank in told["by_rank"]] == [("rehearsal", True), ("rehearsal", False)]
    assert facts(told["why"]).startswith("1 ")
    assert 0 < told["pool_bytes"] < POOL
    assert {rank["pool_bytes"] for rank in told["by_rank"]} == {told["pool_bytes"]}


@pytest.mark.timeout(600)
def test_what_does_not_fit_is_refused_with_the_arithmetic(said: dict[str, dict[str, Any]], kinds: Kinds) -> None:
    report, sentence = said[REFUSED]["report"], said[REFUSED]["refused"]
    assert report["phase"] == "refused"
    assert report["why"] in kinds.log()
    assert facts(sentence).startswith(f"{MAX_MODEL_LEN} ") and "margin" in sentence
