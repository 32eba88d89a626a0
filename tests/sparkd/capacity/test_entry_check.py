"""What `sparkd check` says of an entry's ranks, cache and memory: by vLLM's answer where one is kept, else by the formulas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparkd.capacity.account import NOTHING, Evidence
from sparkd.config.config import parse_model
from sparkd.inquiry.model_answers import OWN, SPARK, ask, kept_here
from tests.sparkd.capacity.test_consultation import ODD, Vllm
from tests.sparkd.capacity.test_vllm_figures import FULL, answer
from tests.sparkd.inquiry.test_model_answers import Engine, one
from tests.sparkd.inquiry.test_model_answers import answer as written
from tests.support.accounts import misfits
from tests.support.checkpoints import dense, write
from tests.support.published_tensors import tensors_of


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(write(tmp_path / "m", dense(), tensors_of(dense())))


def found(folder: str, evidence: Evidence, **keys: object) -> dict[str, str]:
    spec = parse_model("m", {"model": folder, "max_model_len": 4096, **keys}, over_admin=False)
    return dict(misfits(spec, {}, "cuda", evidence))


def test_a_split_is_judged_by_vllm_where_it_answered(folder: str) -> None:
    takes, refuses = (Evidence(ask=Vllm(reply)) for reply in (answer(FULL, blocks=1), replace(answer(), refusal=ODD)))
    # Eight heads do not divide by three.
    assert "tensor_parallel" in found(folder, NOTHING, tensor_parallel=3)
    assert "tensor_parallel" not in found(folder, takes, tensor_parallel=3)
    assert "tensor_parallel" not in found(folder, NOTHING, tensor_parallel=2)
    assert "9 heads are odd" in found(folder, refuses, tensor_parallel=2)["tensor_parallel"]


def test_a_cache_is_judged_by_vllms_layout_and_the_message_says_how_sure_it_is(folder: str) -> None:
    # By the formulas 8 MiB hold 4,096 tokens of 4 layers, 2 x 4 heads of 64 in two bytes; vLLM's answer here has 1,000 bytes a block.
    small, large = {"bytes": "7MiB"}, {"bytes": "17MiB"}
    assert "(known)" in found(folder, NOTHING, kv_cache=small)["kv_cache"]
    assert "kv_cache" not in found(folder, NOTHING, kv_cache=large)
    exact = Evidence(ask=Vllm(answer(FULL, blocks=1)))
    assert "kv_cache" not in found(folder, exact, kv_cache={"bytes": "1MiB"})
    assert "(exact)" in found(folder, exact, kv_cache={"bytes": "200KiB"})["kv_cache"]


def test_a_cache_of_each_rank_of_two_holds_half_a_token(folder: str) -> None:
    assert "kv_cache" in found(folder, NOTHING, kv_cache={"bytes": "9MiB"}, tensor_parallel=1)
    assert "kv_cache" not in found(folder, NOTHING, kv_cache={"bytes": "9MiB"}, tensor_parallel=2)


def test_memory_that_is_too_little_says_how_sure_that_is(folder: str) -> None:
    assert "(known)" in found(folder, NOTHING, memory_gib=1)["memory_gib"]
    assert "(exact)" in found(folder, Evidence(ask=Vllm(answer(FULL, blocks=1))), memory_gib=1)["memory_gib"]
    assert "over 8 nodes (known)" in found(folder, NOTHING, memory_gib=1)["memory_gib"]
    assert "nodes" not in found(folder, NOTHING, memory_gib=1, tensor_parallel=1)["memory_gib"]


def test_an_answer_for_the_nodes_own_gpu_counts_too(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.says(own=[{"question": 0, "answer": written()}])
    assert kept_here([one(platform=SPARK)], engine) == [None]
    ask([one(platform=OWN)], engine)
    (reply,) = kept_here([one(platform=SPARK)], engine)
    assert reply is not None and reply.platform == "cuda:12.1"
