"""What a step reserves: torch's allocator block by block, and whole steps against what an H200 was measured with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparkd.caching_allocator import MIB, CachingAllocator
from sparkd.footprint import footprint
from sparkd.hardware import H200
from sparkd.kv_cost import Serving
from sparkd.step_trace import CUBLAS_BYTES, Step, reserved_bytes
from sparkd.weight_cost import Inventory
from tests import architectures
from tests.architecture_parts import Size
from tests.sketches import known
from workers.stream.recipe import Recipe

# The preset h200 of tests/bench/footprint_measured.py.
SIZE = Size(hidden=4096, vocab=151_936, experts=32, heads=32, kv_heads=8, wide=12_288, inner=1536, times=2)
SERVING = Serving(4096, 16, 8192, prefix_caching=False, batches_in_flight=1)
ROW = 8192 * 4096 * 2


def of(name: str) -> Inventory:
    model = architectures.ARCHITECTURES[name](SIZE)
    return known(dict(model.config), [(entry.name, tuple(entry.shape), entry.dtype) for entry in model.entries])


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([1], 2 * MIB),  # kSmallBuffer
        ([MIB, MIB], 2 * MIB),
        ([MIB + 1], 20 * MIB),  # kLargeBuffer
        ([9 * MIB, 9 * MIB], 20 * MIB),
        ([10 * MIB], 10 * MIB),  # kMinLargeAlloc: as it is, in steps of 2 MiB
        ([11 * MIB], 12 * MIB),
    ],
)
def test_a_segment_is_as_large_as_torch_makes_it(sizes: list[int], reserved: int) -> None:
    allocator = CachingAllocator()
    for size in sizes:
        allocator.take(size)
    assert allocator.reserved == reserved


def test_the_smallest_free_block_is_cut_and_joined_again() -> None:
    allocator = CachingAllocator()
    small, large = allocator.take(64 * MIB), allocator.take(384 * MIB)
    allocator.give_back(small)
    allocator.give_back(large)
    assert allocator.take(48 * MIB).at == small.at
    kept = allocator.take(64 * MIB)
    assert kept.at == large.at and allocator.reserved == 448 * MIB
    # 320 MiB are left of the large one, and are no place for 384.
    again = allocator.take(384 * MIB)
    assert allocator.reserved == 832 * MIB and allocator.held_most == 496 * MIB
    allocator.give_back(again)
    allocator.give_back(kept)
    assert allocator.take(384 * MIB).at == large.at and allocator.reserved == 832 * MIB


@pytest.mark.parametrize(("name", "rows"), [("llama", 3 + 3 * 3), ("gemma3", 19)])
def test_what_is_handed_out_at_once_is_what_was_measured(name: str, rows: int) -> None:
    step = Step(of(name), SERVING, eager=True)
    step.run()
    assert 0 <= step.allocator.held_most - CUBLAS_BYTES - rows * ROW <= MIB


# MiB that torch had reserved at most, weights and cache included: vLLM 0.26 without a compiler (tests/bench/footprint.py --preset h200).
@pytest.mark.parametrize(
    ("name", "form", "measured_mib"),
    [
        ("llama", "bf16", 5528),
        ("llama", "nvfp4", 4600),
        ("qwen3_moe", "bf16", 8356),
        ("qwen3_moe", "nvfp4", 4954),
        ("nemotron_h", "bf16", 8020),
        ("gemma3", "bf16", 7046),
        ("gemma3", "nvfp4", 5742),
        ("deepseek_v3", "bf16", 7736),
    ],
)
def test_the_total_peak_of_an_h200(name: str, form: str, measured_mib: int) -> None:
    found = footprint(of(name), Recipe.parse(form), SERVING, H200, requests=16, eager=True)
    total_mib = sum(found.parts[part] for part in ("weights", "kv", "peak", "graphs")) / MIB
    assert abs(total_mib - measured_mib) <= max(300, 0.05 * measured_mib)


def test_a_compiler_keeps_nothing_in_float32() -> None:
    inventory = of("gemma3")
    assert reserved_bytes(inventory, SERVING, eager=False) < reserved_bytes(inventory, SERVING, eager=True) - 256 * MIB


def test_a_step_of_more_requests_is_reckoned_anew() -> None:
    """With states, so many are gathered; the rows of logits are the same, 16 that each have a token proposed, and 32 without one."""
    few, many = replace(SERVING, speculative_tokens=1), replace(SERVING, max_num_seqs=32)
    inventory, fresh = of("nemotron_h"), of("nemotron_h")
    assert reserved_bytes(inventory, few, eager=True) != reserved_bytes(inventory, many, eager=True)
    assert reserved_bytes(inventory, many, eager=True) == reserved_bytes(fresh, many, eager=True)
