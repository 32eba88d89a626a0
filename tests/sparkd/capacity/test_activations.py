"""What a step reserves, and what makes it larger."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparkd.capacity.activations import MIB, step_bytes
from sparkd.capacity.kv_cache import Serving
from sparkd.capacity.weights import Inventory
from tests.support.architectures import ARCHITECTURES
from tests.support.checkpoints import dense
from tests.support.inventories import known
from tests.support.published_tensors import tensors_of

LARGE = {"hidden_size": 4096, "vocab_size": 151_936, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12_288}
SERVING = Serving(4096, 16, 8192, prefix_caching=False, batches_in_flight=1)


def of(name: str) -> Inventory:
    model = ARCHITECTURES[name](**LARGE)
    return known(dict(model.config), [(entry.name, tuple(entry.shape), entry.dtype) for entry in model.entries])


def test_a_step_grows_with_what_it_holds() -> None:
    shape = known(dense(), tensors_of(dense()))
    small = Serving(4096, 8, 8192, platform="cpu")

    def bytes_of(**more: Any) -> int:
        return step_bytes(shape, replace(small, **more), eager=True)

    assert bytes_of(max_num_batched_tokens=16_384) == 2 * bytes_of()
    assert bytes_of(tensor_parallel=2) < bytes_of() < step_bytes(shape, SERVING, eager=True)
    # A batch of single tokens costs its logits.
    assert bytes_of(max_num_batched_tokens=1, max_num_seqs=400) > 1.9 * bytes_of(max_num_batched_tokens=1, max_num_seqs=200)


def test_a_compiler_keeps_nothing_in_float32() -> None:
    inventory = of("gemma3")
    assert step_bytes(inventory, SERVING, eager=False) < step_bytes(inventory, SERVING, eager=True) - 256 * MIB


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_next"])
def test_each_request_has_states(name: str) -> None:
    few, many = replace(SERVING, max_num_seqs=1), replace(SERVING, max_num_seqs=32)
    assert step_bytes(of(name), many, eager=True) > step_bytes(of(name), few, eager=True) + 31 * MIB


def test_latent_attention_keeps_a_place_for_earlier_tokens() -> None:
    inventory = of("deepseek_v3")
    short, long = (step_bytes(inventory, replace(SERVING, max_model_len=tokens), eager=True) for tokens in (1024, 4096))
    assert long - short == (32_768 - 8192) * 2 * (32 * (128 + 128 + 128 + 64) + 576)
