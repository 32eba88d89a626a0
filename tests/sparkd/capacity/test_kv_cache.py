"""What a cache costs by the rough estimate: what must hold for any model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sparkd.capacity.estimate import token_bytes
from sparkd.capacity.kv_cache import KvCost, Serving
from sparkd.checkpoint.shape import Attention, Shape, shape_of
from tests.support.accounts import kv_cost
from tests.support.checkpoints import dense
from tests.support.inventories import shape

FULL, WINDOW = Attention(8, 128, 128), Attention(8, 128, 128, window=1024)


def of(layers: Sequence[Attention | None]) -> Shape:
    return replace(shape_of(dense(max_position_embeddings=1 << 20)), layers=len(layers), attentions=tuple(layers))


def test_a_request_of_layers_that_are_all_alike() -> None:
    found = kv_cost(of([FULL] * 10), Serving(1000))

    assert found == KvCost(10 * 16 * 8 * 256 * 2, 63, 1000)
    assert found.per_request == 63 * found.block_bytes and found.least == 64 * found.block_bytes
    assert found.per_token == found.per_request / 1000


def test_a_window_holds_no_more_than_itself_and_the_batches_in_flight() -> None:
    both = of([FULL, WINDOW])
    blocks = {tokens: kv_cost(both, Serving(tokens, max_num_batched_tokens=2048)).blocks for tokens in (1024, 65536, 131072)}

    # A window may begin inside a block, so it takes one more.
    assert blocks == {1024: 64 + 65, 65536: 4096 + (1023 + 4096 + 15) // 16 + 1, 131072: 8192 + 321}
    assert kv_cost(both, Serving(65536, max_num_batched_tokens=2048, batches_in_flight=1)).blocks == 4096 + 193
    assert kv_cost(both, Serving(65536, max_num_batched_tokens=2048, pipeline_parallel=2)).blocks == 4096 + 449


def test_heads_fewer_than_ranks_are_on_several_and_a_latent_one_is_on_all() -> None:
    def bytes_of(one: Attention, **more: Any) -> list[int]:
        return [token_bytes(one, of([one]), Serving(1, tensor_parallel=ranks, **more)) for ranks in (1, 2, 8, 16)]

    assert bytes_of(FULL) == [4096, 2048, 512, 512]
    assert bytes_of(FULL, kv_dtype="fp8") == [2048, 1024, 256, 256]
    assert bytes_of(Attention(1, 576, 0, latent=True)) == [1152] * 4


def test_a_model_without_a_cache_needs_none() -> None:
    for found in (kv_cost(of([None] * 4), Serving(4096)), kv_cost(shape("gemma-4-12b-it-assistant"), Serving(2048))):
        assert (found.per_request, found.least) == (0, 0)


def test_a_pipeline_has_the_blocks_of_its_share() -> None:
    whole = kv_cost(of([FULL] * 8), Serving(4096))
    found = kv_cost(of([FULL] * 8), Serving(4096, pipeline_parallel=2))

    assert found.block_bytes * 2 == whole.block_bytes and found.blocks == whole.blocks
    assert kv_cost(of([FULL] * 8), Serving(4096, draft_layers=2)).block_bytes * 8 == whole.block_bytes * 10


def test_layers_with_a_window_are_in_as_many_groups_as_hold_them() -> None:
    whole, mixed = kv_cost(of([FULL] * 2), Serving(65536)), kv_cost(of([FULL, FULL, *[WINDOW] * 6]), Serving(65536))
    window = kv_cost(of([WINDOW] * 2), Serving(65536))

    assert mixed.block_bytes == whole.block_bytes == window.block_bytes
    assert mixed.blocks == whole.blocks + 3 * window.blocks
