from __future__ import annotations

import types

import pytest
import torch

from workers.stream import repack


def interleaved(weight: torch.Tensor, scale: torch.Tensor, both: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As a kernel's repacking: another dtype and shape, the same bytes; and one value for each expert."""
    return weight.flip(-1).contiguous().view(torch.int32).reshape(weight.shape[0], -1), scale.amax(dim=-1) * both


def layered(layer, weight, scale, *, is_act_and_mul):
    assert layer.num_experts == weight.shape[0]
    assert layer.hidden_size == 64
    assert is_act_and_mul
    return interleaved(weight, scale, 2.0)


@pytest.mark.parametrize("experts", [1, 2, 5, 8])
@pytest.mark.parametrize("at_once", [1, 512, 1100, 1 << 20])
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


def test_what_is_not_one_entry_for_each_expert_is_done_as_stock_does(monkeypatch):
    monkeypatch.setattr(repack, "AT_ONCE_BYTES", 12)

    def joined(weight):
        return weight.reshape(1, -1)

    weight = torch.arange(24, dtype=torch.uint8).reshape(4, 6)
    assert torch.equal(repack.few_at_a_time(joined, (0,))(weight), weight.reshape(1, -1))


def test_a_release_without_the_function_is_named(monkeypatch):
    monkeypatch.setattr(repack, "_BY_EXPERT", (("workers.stream.trace", "no_such_function", (0,), None),))
    assert repack.repack_in_place() == ["workers.stream.trace.no_such_function"]
