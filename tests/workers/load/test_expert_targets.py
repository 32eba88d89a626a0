from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from workers.load.trace import Trace, expert_families, inferred_targets, phantoms, place
from workers.load.virtual import OutputTensor

EXPERTS, ROWS, COLS = 6, 4, 8
CPU = torch.device("cpu")


class Layer:
    """A fused parameter as vLLM has it: gate and up behind each other, every expert's behind the one before."""

    def __init__(self, *, odd: bool = False) -> None:
        self.w13 = torch.zeros(EXPERTS, 2 * ROWS, COLS)
        self.w2 = torch.zeros(EXPERTS, COLS, ROWS)
        self.scale = torch.zeros(EXPERTS, 2)
        self.odd = odd

    def load(self, name: str, tensor: torch.Tensor) -> None:
        expert = int(name.split(".")[5])
        if self.odd and expert == EXPERTS - 1:
            expert = 2
        if name.endswith("scale"):
            self.scale[expert, int("up" in name)] = tensor.reshape(())
        elif "down" in name:
            self.w2[expert].copy_(tensor.t())
        else:
            at = ROWS if "up" in name else 0
            self.w13.data[expert].narrow(0, at, ROWS).copy_(tensor.narrow(1, 0, COLS))

    def memory(self) -> list[torch.Tensor]:
        return [self.w13, self.w2, self.scale]


def outputs(experts: int = EXPERTS) -> list[OutputTensor]:
    return [
        OutputTensor(f"model.layers.3.mlp.experts.{expert}.{name}", shape, torch.float32, 0)
        for expert in range(experts)
        for name, shape in (
            ("gate_proj.weight", (ROWS, 2 * COLS)),
            ("up_proj.weight", (ROWS, 2 * COLS)),
            ("down_proj.weight", (ROWS, COLS)),
            ("up_proj.scale", (1,)),
        )
    ]


def asked(layer: Layer, tensors: list[OutputTensor], keep: Callable[[int], bool] = lambda _number: True):
    found = expert_families(tensors)
    wanted = {family.names[number] for family in found for number in family.traced}
    trace = Trace()
    for name, phantom in phantoms([(one.name, one.shape, one.dtype) for one in tensors if one.name in wanted], CPU, trace):
        layer.load(name, phantom)
    return wanted, trace, inferred_targets(found, trace.tensors)


def test_all_experts_end_where_vllm_puts_them():
    tensors = outputs()
    values = {one.name: torch.rand(one.shape) for one in tensors}
    want, got = Layer(), Layer()
    wanted, trace, direct_targets = asked(got, tensors)
    assert len(direct_targets) == len(tensors) - len(wanted)
    for one in tensors:
        want.load(one.name, values[one.name])
        if one.name in direct_targets:
            place(direct_targets[one.name], values[one.name])
        else:
            got.load(one.name, values[one.name])
    assert all(torch.equal(a, b) for a, b in zip(want.memory(), got.memory(), strict=True))
    assert trace.tensors["model.layers.3.mlp.experts.4.gate_proj.weight"].region == ((0, ROWS), (0, COLS))


def test_three_that_are_not_on_a_line_leave_all_to_vllm():
    _, trace, direct_targets = asked(Layer(odd=True), outputs())
    assert direct_targets == {}
    assert trace.tensors["model.layers.3.mlp.experts.4.down_proj.weight"].region is not None


@pytest.mark.parametrize("experts", [1, 2, 3])
def test_few_experts_are_all_asked(experts):
    tensors = outputs(experts)
    wanted, _, direct_targets = asked(Layer(), tensors)
    assert wanted == {one.name for one in tensors}
    assert direct_targets == {}


def test_an_expert_that_the_rank_does_not_take_is_not_needed():
    class Elsewhere(Layer):
        def load(self, name: str, tensor: torch.Tensor) -> None:
            pass

    _, trace, direct_targets = asked(Elsewhere(), outputs())
    assert direct_targets == {}
    assert all(one.region is None for one in trace.tensors.values())
