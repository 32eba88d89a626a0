"""What a step reserves, against what an H200 was measured with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparkd.capacity.activations import MIB, step_bytes
from sparkd.capacity.footprint import Terms, footprint
from sparkd.capacity.kv_cache import Serving
from sparkd.capacity.weights import Inventory
from sparkd.hardware import H200
from tests.support import architectures
from tests.support.architecture_parts import Size
from tests.support.checkpoints import dense, tensors_of
from tests.support.inventories import known
from workers.quantization.recipe import QuantizationRecipe

# What the H200's engines were started with.
SIZE = Size(hidden=4096, vocab=151_936, experts=32, heads=32, kv_heads=8, wide=12_288, inner=1536, times=2)
SERVING = Serving(4096, 16, 8192, prefix_caching=False, batches_in_flight=1)


def of(name: str) -> Inventory:
    model = architectures.ARCHITECTURES[name](SIZE)
    return known(dict(model.config), [(entry.name, tuple(entry.shape), entry.dtype) for entry in model.entries])


# MiB that torch had reserved at most, weights and cache included: vLLM 0.26 without a compiler.
@pytest.mark.parametrize(
    ("name", "form", "measured_mib"),
    [
        ("llama", "bf16", 5528),
        ("llama", "nvfp4", 4600),
        ("qwen3_moe", "bf16", 8356),
        ("qwen3_moe", "nvfp4", 4954),
        ("nemotron_h", "bf16", 8020),
        ("nemotron_h", "nvfp4", 5560),
        ("gemma3", "bf16", 7046),
        ("gemma3", "nvfp4", 5742),
        ("deepseek_v3", "bf16", 7736),
        ("deepseek_v3", "nvfp4", 5760),
        ("qwen3_next", "bf16", 13_672),
    ],
)
def test_the_total_peak_of_an_h200(name: str, form: str, measured_mib: int) -> None:
    found = footprint(of(name).formatted(QuantizationRecipe.parse(form)), SERVING, H200, Terms(requests=16, eager=True))
    total_mib = sum(found.parts[part] for part in ("weights", "kv", "peak", "graphs")) / MIB
    assert abs(total_mib - measured_mib) <= 0.03 * measured_mib


def test_a_step_grows_with_what_it_holds() -> None:
    shape = known(dense(), tensors_of(dense()))
    small = Serving(4096, 8, 8192, platform="cpu")

    def bytes_of(**more: Any) -> int:
        return step_bytes(shape, replace(small, **more), eager=True)

    assert bytes_of(max_num_batched_tokens=16_384) == 2 * bytes_of()
    assert bytes_of(tensor_parallel=2) < bytes_of() < step_bytes(shape, SERVING, eager=True)
    # A batch of single tokens costs its logits.
    assert bytes_of(max_num_batched_tokens=1, max_num_seqs=400) > 1.9 * bytes_of(max_num_batched_tokens=1, max_num_seqs=200)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
def test_a_compiler_keeps_nothing_in_float32(name: str) -> None:
    inventory = of(name)
    assert step_bytes(inventory, SERVING, eager=False) < step_bytes(inventory, SERVING, eager=True) - 256 * MIB


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_next"])
def test_each_request_has_states(name: str) -> None:
    few, many = replace(SERVING, max_num_seqs=1), replace(SERVING, max_num_seqs=32)
    assert step_bytes(of(name), many, eager=True) > step_bytes(of(name), few, eager=True) + 31 * MIB


def test_latent_attention_keeps_a_place_for_earlier_tokens() -> None:
    inventory = of("deepseek_v3")
    short, long = (step_bytes(inventory, replace(SERVING, max_model_len=tokens), eager=True) for tokens in (1024, 4096))
    assert long - short == (32_768 - 8192) * 2 * (32 * (128 + 128 + 128 + 64) + 576)
