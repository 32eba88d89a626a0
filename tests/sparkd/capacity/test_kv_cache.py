"""What a cache costs: figures that others published, what engines reported, and what must hold for any model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparkd.capacity.kv_cache import KvCost, Serving, stages_of, state_bytes, token_bytes
from sparkd.hardware import GIB
from sparkd.models.shape import Attention, Mixer, RecurrentState, Shape, shape_of
from tests.support.accounts import kv_cost
from tests.support.checkpoints import dense
from tests.support.inventories import architecture, shape

FULL, WINDOW = Attention(8, 128, 128), Attention(8, 128, 128, window=1024)
STATE = RecurrentState(8192, 3, 32, 128, 128, key_heads=16, matrix_dtype="float32")


def of(mixers: list[Mixer | None]) -> Shape:
    return replace(shape_of(dense(max_position_embeddings=1 << 20)), layers=len(mixers), mixers=tuple(mixers))


@pytest.mark.parametrize(
    ("fixture", "available_gib", "serving", "tokens", "requests"),
    [
        # vLLM 0.23 on a Spark: spark-vllm-guide.txt, section 8, startup log.
        ("qwen3.6-35b-a3b-nvfp4", 76.49, Serving(65536, kv_dtype="fp8", speculative_tokens=3, draft_layers=1), 4_843_965, 73.91),
        # mitchross/talos-argocd-proxmox#1995
        ("qwen3.8-27b-fp8", 4.99, Serving(131072, kv_dtype="fp8", tensor_parallel=2), 302_921, 2.31),
    ],
)
def test_a_published_cache_is_reproduced_to_the_token(
    fixture: str, available_gib: float, serving: Serving, tokens: int, requests: float
) -> None:
    found, pool = kv_cost(shape(fixture), serving), int(available_gib * GIB)

    assert found.tokens(pool) == tokens
    assert round(found.requests(pool), 2) == requests


@pytest.mark.parametrize(
    ("name", "prefix_caching", "per_token"),
    [
        ("llama", False, 1024),
        ("gemma3", False, 3072),
        ("deepseek_v3", False, 2304),
        ("gpt_oss-bf16", False, 768),
        ("qwen3_next", False, 1152),
        ("qwen3_next", True, 1728),
    ],
)
def test_what_engines_reported_on_a_cpu(name: str, prefix_caching: bool, per_token: int) -> None:
    """vLLM 0.32, synchronous: one batch of 256 tokens in flight."""
    serving = Serving(1024, max_num_batched_tokens=256, prefix_caching=prefix_caching, platform="cpu", batches_in_flight=1)

    assert kv_cost(architecture(name).shape, serving).per_token == per_token


def test_a_request_of_layers_that_are_all_alike() -> None:
    found = kv_cost(of([FULL] * 10), Serving(1000))

    assert found == KvCost(10 * 16 * 8 * 256 * 2, 63, 16, 1000)
    assert found.per_request == 63 * found.block_bytes and found.least == 64 * found.block_bytes
    assert found.per_token == found.per_request / 1000
    assert found.requests(130 * found.block_bytes - 1) == 129 / 63 and found.tokens(63 * found.block_bytes) == 1000


def test_a_window_holds_no_more_than_itself_and_the_batches_in_flight() -> None:
    both = of([FULL, WINDOW])
    blocks = {tokens: kv_cost(both, Serving(tokens, max_num_batched_tokens=2048)).blocks for tokens in (1024, 65536, 131072)}

    # A window may begin inside a block, so it takes one more.
    assert blocks == {1024: 64 + 65, 65536: 4096 + (1023 + 4096 + 15) // 16 + 1, 131072: 8192 + 321}
    assert kv_cost(both, Serving(65536, max_num_batched_tokens=2048, batches_in_flight=1)).blocks == 4096 + 193
    assert kv_cost(both, Serving(65536, max_num_batched_tokens=2048, pipeline_parallel=2)).blocks == 4096 + 449


def test_a_state_costs_the_same_at_every_length() -> None:
    shape_, serving = of([STATE] * 4), Serving(1000, prefix_caching=False)
    size = 8192 * 3 * 2 + 32 * 128 * 128 * 4

    assert state_bytes(STATE, shape_, serving) == size
    assert kv_cost(shape_, serving) == KvCost(4 * size, 1, 0, 1000)
    assert kv_cost(shape_, replace(serving, prefix_caching=True, speculative_tokens=2)).blocks == 4
    assert state_bytes(STATE, shape_, replace(serving, speculative_tokens=2)) == size + 8192 * 2 * 2
    assert state_bytes(STATE, shape_, replace(serving, tensor_parallel=2)) == size // 2


def test_heads_fewer_than_ranks_are_on_several_and_a_latent_one_is_on_all() -> None:
    def bytes_of(one: Attention, **more: Any) -> list[int]:
        return [token_bytes(one, of([one]), Serving(1, tensor_parallel=ranks, **more)) for ranks in (1, 2, 8, 16)]

    assert bytes_of(FULL) == [4096, 2048, 512, 512]
    assert bytes_of(FULL, kv_dtype="fp8") == [2048, 1024, 256, 256]
    assert bytes_of(Attention(1, 576, 0, latent=True)) == [1152] * 4


def test_a_model_without_a_cache_needs_none() -> None:
    for found in (kv_cost(of([None] * 4), Serving(4096)), kv_cost(shape("gemma-4-12b-it-assistant"), Serving(2048))):
        assert (found.per_request, found.least, found.block_tokens) == (0, 0, 0)
        assert found.requests(0) == float("inf") and found.tokens(GIB) == 0


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [(8, 1, [8]), (8, 2, [4, 4]), (9, 2, [5, 4]), (10, 4, [2, 3, 3, 2]), (61, 3, [20, 21, 20]), (2, 3, [1, 1, 0])],
)
def test_the_stages_of_a_pipeline(layers: int, stages: int, sizes: list[int]) -> None:
    placed = stages_of(layers, stages)

    assert placed == sorted(placed) and [placed.count(stage) for stage in range(stages)] == sizes


def test_a_pipeline_has_the_blocks_of_its_fullest_stage() -> None:
    whole = kv_cost(of([FULL] * 9), Serving(4096))
    found = kv_cost(of([FULL] * 9), Serving(4096, pipeline_parallel=2))

    assert found.block_bytes * 9 == whole.block_bytes * 5 and found.blocks == whole.blocks
    drafted = kv_cost(of([FULL] * 9), Serving(4096, pipeline_parallel=2, draft_layers=2))
    assert drafted.block_bytes * 9 == whole.block_bytes * 6
