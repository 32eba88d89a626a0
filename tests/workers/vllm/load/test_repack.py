from __future__ import annotations

import sys
import types
from types import ModuleType

import pytest
import torch

from workers.vllm.load import repack
from workers.vllm.symbols import TABLE


def interleaved(weight: torch.Tensor, scale: torch.Tensor, both: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As a kernel's repacking: another dtype and shape, the same bytes; and one value for each expert."""
    return weight.flip(-1).contiguous().view(torch.int32).reshape(weight.shape[0], -1), scale.amax(dim=-1) * both


def layered(layer, weight, scale, *, is_act_and_mul):
    assert layer.num_experts == weight.shape[0]
    assert layer.hidden_size == 64
    assert is_act_and_mul
    return interleaved(weight, scale, 2.0)


@pytest.mark.parametrize(("experts", "at_once"), [(1, 1), (2, 512), (5, 1), (8, 1100), (8, 1 << 20)])
def test_few_at_a_time_gives_what_all_at_once_gives_in_the_same_memory(monkeypatch, experts, at_once):
    monkeypatch.setattr(repack, "AT_ONCE_BYTES", at_once)
    weight = torch.randint(0, 255, (experts, 8, 64), dtype=torch.uint8)
    scale = torch.rand(experts, 8)
    want = interleaved(weight, scale, 3.0)
    home = weight.clone()
    got = repack.few_at_a_time(interleaved, (0, 1))(home, scale=scale, both=3.0)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    if experts > 1 and at_once < experts * 512:
        assert got[0].data_ptr() == home.data_ptr()


def test_a_layer_says_as_many_experts_as_there_are(monkeypatch):
    monkeypatch.setattr(repack, "AT_ONCE_BYTES", 1024)
    weight, scale = torch.randint(0, 255, (6, 8, 64), dtype=torch.uint8), torch.rand(6, 8)
    layer = types.SimpleNamespace(num_experts=6, hidden_size=64)
    want = interleaved(weight, scale, 2.0)
    got = repack.few_at_a_time(layered, (1, 2), 0)(layer=layer, weight=weight, scale=scale, is_act_and_mul=True)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_a_result_of_another_size_gets_memory_of_its_own(monkeypatch):
    monkeypatch.setattr(repack, "AT_ONCE_BYTES", 1)

    def padded(weight):
        return torch.nn.functional.pad(weight, (0, 8))

    weight = torch.randint(0, 255, (4, 8, 64), dtype=torch.uint8)
    before = weight.clone()
    got = repack.few_at_a_time(padded, (0,))(weight)
    assert torch.equal(got, padded(before))
    assert torch.equal(weight, before)


def test_a_release_without_the_function_is_named(monkeypatch, caplog):
    home = TABLE["gptq_marlin_moe_repack"].homes[0]
    monkeypatch.setitem(sys.modules, home, ModuleType(home))
    repack.repack_in_place()
    assert f"{home}.gptq_marlin_moe_repack" in caplog.text


class Nvfp4Layer:
    """What vLLM's own function asks of a layer of experts: [8 experts], K=128, N=64."""

    num_experts, hidden_size, intermediate_size_per_partition, params_dtype = 8, 128, 64, torch.bfloat16


@pytest.fixture
def marlin(monkeypatch):
    """vLLM's module with a kernel of the same contract in place of the CUDA one: it permutes bytes, and differs by place."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

    def permuted(*, b_q_weight, size_k, size_n, num_bits, is_a_8bit, perm=None):
        assert b_q_weight.shape == (size_k // 8, size_n)
        if size_n % 64 or size_k % 16:
            raise RuntimeError(f"size_n = {size_n} is not divisible by tile_n_size = 64")
        assert (num_bits, is_a_8bit) == (4, False)
        return b_q_weight.reshape(size_k // 16, size_n * 2).flip(0) + 1

    monkeypatch.setattr(marlin_utils_fp4.ops, "gptq_marlin_repack", permuted, raising=False)
    monkeypatch.setattr(
        marlin_utils_fp4, "marlin_make_workspace_new", lambda device, blocks: torch.zeros(blocks), raising=False
    )  # gone in vLLM 0.32
    return marlin_utils_fp4


def nvfp4_experts(experts: int = 8, n: int = 64, k: int = 128) -> list[torch.Tensor]:
    """(w13, its scales, its second-level scales, w2, ..), as vLLM gives them to its Marlin repacking."""
    torch.manual_seed(3)

    def part(rows: int, columns: int) -> list[torch.Tensor]:
        packed = torch.randint(0, 255, (experts, rows, columns // 2), dtype=torch.uint8)
        scales = torch.rand(experts, rows, columns // 16).mul_(300).to(torch.float8_e4m3fn)
        return [packed, scales, torch.rand(experts) * 1e-3]

    return [*part(2 * n, k), *part(k, n)]


def test_nvfp4_experts_repacked_few_at_a_time_stand_for_the_same_weights(monkeypatch, marlin):
    """Each group of experts has a factor of its own, a power of two, which its second-level scales take back."""
    stock = marlin.prepare_nvfp4_moe_layer_for_marlin
    given = nvfp4_experts()
    want = stock(Nvfp4Layer(), *(one.clone() for one in given), True)
    homes = [one.data_ptr() for one in given]
    monkeypatch.setattr(repack, "AT_ONCE_BYTES", 3 * given[0][0].numel())
    got = repack.few_at_a_time(stock, (1, 2, 3, 4, 5, 6), 0)(Nvfp4Layer(), *given, is_act_and_mul=True)

    assert [got[at].data_ptr() for at in (0, 1, 3, 4)] == [homes[at] for at in (0, 1, 3, 4)]
    for ours, stocks in ((got[:3], want[:3]), (got[3:], want[3:])):
        assert torch.equal(ours[0].view(torch.uint8), stocks[0].contiguous().view(torch.uint8))
        assert torch.equal(scaled(*ours[1:]), scaled(*stocks[1:]))


def scaled(scales: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The scales that Marlin computes with, but for one constant: S0E5M3 is float16 without its sign and last bits."""
    halves = (scales.contiguous().view(torch.uint8).to(torch.int16) << 7).view(torch.float16)
    return halves.double() * second.double().view(-1, 1, 1)


def test_a_padded_nvfp4_layer_is_repacked_as_stock_does(monkeypatch, marlin):
    stock = marlin.prepare_nvfp4_moe_layer_for_marlin
    layer = Nvfp4Layer()
    layer.intermediate_size_per_partition = 48
    given = nvfp4_experts(n=48)
    want = stock(layer, *(one.clone() for one in given), True)
    monkeypatch.setattr(repack, "AT_ONCE_BYTES", 3 * given[0][0].numel())
    got = repack.few_at_a_time(stock, (1, 2, 3, 4, 5, 6), 0)(layer, *given, True)
    for ours, stocks in ((got[:3], want[:3]), (got[3:], want[3:])):
        assert torch.equal(ours[0].view(torch.uint8), stocks[0].contiguous().view(torch.uint8))
        assert torch.equal(scaled(*ours[1:]), scaled(*stocks[1:]))
