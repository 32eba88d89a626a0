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
from tests.bench.footprint_segments import told
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
    # Both are whole again.
    assert {allocator.take(384 * MIB).at, allocator.take(384 * MIB).at} == {large.at, again.at} and allocator.reserved == 832 * MIB


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
        ("nemotron_h", "nvfp4", 5560),
        ("gemma3", "bf16", 7046),
        ("gemma3", "nvfp4", 5742),
        ("deepseek_v3", "bf16", 7736),
        ("deepseek_v3", "nvfp4", 5760),
        ("qwen3_next", "bf16", 13_672),
    ],
)
def test_the_total_peak_of_an_h200(name: str, form: str, measured_mib: int) -> None:
    found = footprint(of(name), Recipe.parse(form), SERVING, H200, requests=16, eager=True)
    total_mib = sum(found.parts[part] for part in ("weights", "kv", "peak", "graphs")) / MIB
    assert abs(total_mib - measured_mib) <= 0.03 * measured_mib


def test_what_a_stream_has_given_back_is_no_other_streams() -> None:
    allocator = CachingAllocator()
    pinned, free = allocator.take(32 * MIB), allocator.take(128 * MIB)
    allocator.give_back(free)
    part = allocator.take(96 * MIB)
    assert allocator.reserved == 160 * MIB
    allocator.switch()
    allocator.take(16 * MIB)
    assert allocator.reserved == 176 * MIB  # 32 MiB are free in the other stream's segment
    allocator.give_back(part)
    allocator.release()
    assert allocator.reserved == 48 * MIB and pinned.size == 32 * MIB


def test_of_two_places_of_one_size_the_younger_segments_goes_first() -> None:
    allocator = CachingAllocator()
    older, younger = allocator.take(64 * MIB), allocator.take(64 * MIB)
    allocator.give_back(older)
    allocator.give_back(younger)
    assert allocator.take(64 * MIB).at == younger.at


def test_the_course_of_a_hybrids_start_is_the_one_that_was_traced() -> None:
    """MiB that an H200 reserved for it in NVFP4 (tests/bench/footprint.py --segments): at most while vLLM profiles itself, and once all is
    given back that nothing holds (512: cuBLAS and the sampler hold two segments of 128 by 32 and 9 of them)."""
    step = Step(of("nemotron_h"), SERVING, eager=True, quantized=True)
    step._profiling = True
    step.run()
    assert abs(step.allocator.reserved / MIB - 994) <= 2
    step.allocator.release()
    assert abs(step.allocator.reserved / MIB - 512) <= 2 and abs(step.allocator.held / MIB - 297) <= 1


def test_a_compiler_keeps_nothing_in_float32() -> None:
    inventory = of("gemma3")
    assert reserved_bytes(inventory, SERVING, eager=False) < reserved_bytes(inventory, SERVING, eager=True) - 256 * MIB


def test_a_step_of_more_requests_is_reckoned_anew() -> None:
    """With states, so many are gathered; the rows of logits are the same, 16 that each have a token proposed, and 32 without one."""
    few, many = replace(SERVING, speculative_tokens=1), replace(SERVING, max_num_seqs=32)
    inventory, fresh = of("nemotron_h"), of("nemotron_h")
    assert reserved_bytes(inventory, few, eager=True) != reserved_bytes(inventory, many, eager=True)
    assert reserved_bytes(inventory, many, eager=True) == reserved_bytes(fresh, many, eager=True)


def test_the_bench_tells_what_a_segment_was_for() -> None:
    frames = [
        {"filename": "/site/torch/nn/modules/module.py", "line": 9},
        {"filename": "/site/vllm/model_executor/layers/mamba/mamba_mixer2.py", "line": 5},
    ]
    events = [
        {"action": "segment_alloc", "addr": 0, "size": 64 * MIB},
        {"action": "alloc", "addr": 0, "size": 60 * MIB, "frames": frames},
        {"action": "free_completed", "addr": 0, "size": 60 * MIB},
        {"action": "segment_alloc", "addr": 1 << 40, "size": 128 * MIB},
        {"action": "alloc", "addr": 1 << 40, "size": 128 * MIB, "frames": frames},
        {"action": "segment_free", "addr": 0, "size": 64 * MIB},
    ]
    assert list(told(events)) == [
        "+ 64 for 60.0: 64 reserved, 60 held: mamba_mixer2:5",
        "+ 128 for 128.0: 192 reserved, 128 held: mamba_mixer2:5",
        "- 64: 128 reserved, 128 held",
        "0 segments under 20 MiB; at most 192 MiB reserved, in segments of",
        "  128, 128 held: 128.0 mamba_mixer2:5",
        "  64, 0 held: nothing",
    ]
