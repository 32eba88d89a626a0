"""What config.json says of layers that keep something else than all keys: chunks, Kimi's delta attention, Falcon's pair, indexers.

The keys are those of the models' own classes; the sizes are not of any published model.
"""

from __future__ import annotations

from typing import Any

import pytest

from sparkd.errors import CheckpointError
from sparkd.kv_cost import Serving, kv_cost, token_bytes
from sparkd.legal import _heads
from sparkd.model_shape import Attention, Mixer, State, shape_of
from tests.sketches import dense

FULL = Attention(4, 64, 64)
CHUNK = Attention(4, 64, 64, window=1024, chunked=True)
DEEPSEEK = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
KEYS = Attention(1, 132, 0, latent=True, element_bytes=1)
KIMI = {
    "model_type": "kimi_linear",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 8, "head_dim": 128, "short_conv_kernel_size": 4},
    "num_experts": 16,
    "num_experts_per_token": 4,
}
FALCON = {
    "model_type": "falcon_h1",
    "mamba_n_heads": 16,
    "mamba_d_head": 64,
    "mamba_n_groups": 2,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_d_ssm": 768,
}


def llama4(**more: Any) -> dict[str, Any]:
    return {"model_type": "llama4", "text_config": dense(**{"model_type": "llama4_text", "attention_chunk_size": 1024, **more})}


@pytest.mark.parametrize(
    ("config", "mixers"),
    [
        (llama4(), [CHUNK, CHUNK, CHUNK, FULL]),
        (llama4(no_rope_layers=[1, 0, 1, 0]), [CHUNK, FULL, CHUNK, FULL]),
        (llama4(no_rope_layers=[], no_rope_layer_interval=2), [CHUNK, FULL, CHUNK, FULL]),
        (llama4(layer_types=["full_attention", *["chunked_attention"] * 3]), [FULL, CHUNK, CHUNK, CHUNK]),
        ({"text_config": {**llama4()["text_config"], "attention_chunk_size": None}}, [FULL] * 4),
        (dense(model_type="llama4_text"), [Attention(4, 64, 64, window=8192, chunked=True)] * 3 + [FULL]),
    ],
)
def test_chunks_of_llama_4(config: dict[str, Any], mixers: list[Mixer]) -> None:
    assert list(shape_of(config).mixers) == mixers


def test_a_chunk_holds_no_more_than_itself_and_the_batches_in_flight() -> None:
    shape = shape_of(llama4())
    short, long = (kv_cost(shape, Serving(tokens, max_num_batched_tokens=512)) for tokens in (1024, 8192))

    assert (short.blocks, long.blocks) == (4 * 64, 512 + 3 * 128)


def test_kimi_linear() -> None:
    shape = shape_of(dense(**KIMI))
    delta = State(3 * 8 * 128, 3, 8, 128, 128, key_heads=8, matrix_dtype="float32")

    assert shape.mixers == (delta, delta, delta, Attention(1, 576, 0, latent=True)) and shape.active_experts == 4
    with pytest.raises(CheckpointError, match="num_heads"):
        shape_of(dense(**{**KIMI, "linear_attn_config": {"kda_layers": [1]}}))


def test_every_layer_of_falcon_h1_keeps_a_state_beside_its_keys() -> None:
    shape = shape_of(dense(**FALCON))
    state = State(768, 3, 16, 64, 128, 2, 128)

    assert (shape.mixers, shape.beside) == ((FULL,) * 4, (state,) * 4)
    assert shape_of(dense(**{**FALCON, "mamba_d_ssm": None})).beside == (State(1024, 3, 16, 64, 128, 2, 128),) * 4
    assert any("16 heads of linear attention" in why for why in _heads(shape, 3))


@pytest.mark.parametrize(
    ("more", "layers"),
    [
        ({}, [0, 1, 2, 3]),
        ({"index_topk_freq": 2}, [0, 1, 3]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [0, 2]),
        ({"index_topk_pattern": "FSSF"}, [0, 3]),
        ({"index_topk_pattern": ["F", "S"]}, [0, 2, 3]),
    ],
)
def test_the_keys_of_a_sparse_attentions_indexer(more: dict[str, Any], layers: list[int]) -> None:
    assert shape_of(dense(**DEEPSEEK, **more)).beside == tuple(KEYS if number in layers else None for number in range(4))


def test_a_sparse_cache_in_fp8_has_its_scales_beside() -> None:
    shape = shape_of(dense(**DEEPSEEK))
    latent = shape.mixers[0]

    assert isinstance(latent, Attention)
    assert [token_bytes(latent, shape, Serving(1, kv_dtype=dtype)) for dtype in ("auto", "fp8")] == [1152, 656]
    assert [token_bytes(KEYS, shape, Serving(1, kv_dtype=dtype, tensor_parallel=8)) for dtype in ("auto", "fp8")] == [132, 132]
    assert kv_cost(shape, Serving(6400)).per_token == 4 * (1152 + 132)
    assert not shape_of(dense(kv_lora_rank=512)).beside and not shape_of(dense(index_topk=1)).beside
