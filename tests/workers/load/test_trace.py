from __future__ import annotations

import pytest
import torch

from workers.load.trace import NotAView, TensorTrace, Trace, phantom_of, phantoms

CPU = torch.device("cpu")


def asked(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> tuple[TensorTrace, torch.Tensor]:
    trace = Trace()
    ((name, tensor),) = phantoms([("w", shape, dtype)], CPU, trace)
    return trace.tensors[name], tensor


TAKES = [
    ("whole", lambda w: w, ((0, 8), (0, 6)), (8, 6)),
    ("narrowed columns", lambda w: w.narrow(1, 2, 3), ((0, 8), (2, 5)), (8, 3)),
    ("sliced twice", lambda w: w[2:6, 1:4][1:], ((3, 6), (1, 4)), (3, 3)),
    ("uneven split", lambda w: w.split([1, 5], dim=1)[1], ((0, 8), (1, 6)), (8, 5)),
    ("transposed", lambda w: w.t().narrow(0, 0, 3), ((0, 8), (0, 3)), (3, 8)),
    ("one row", lambda w: w[3], ((3, 4), (0, 6)), (6,)),
    ("unbound", lambda w: w.unbind(1)[2], ((0, 8), (2, 3)), (8,)),
    ("one expert, as vLLM takes it", lambda w: w.unsqueeze(0).unbind()[0].narrow(0, 4, 4), ((4, 8), (0, 6)), (4, 6)),
    ("viewed with ones", lambda w: w.view(8, 1, 6)[:2].squeeze(1), ((0, 2), (0, 6)), (2, 6)),
    ("cast", lambda w: w.to(torch.float32)[:1], ((0, 1), (0, 6)), (1, 6)),
]


@pytest.mark.parametrize(("take", "region", "shape"), [case[1:] for case in TAKES], ids=[case[0] for case in TAKES])
def test_what_a_weight_loader_copies_is_what_is_taken(take, region, shape):
    traced, tensor = asked((8, 6))
    part = take(tensor)
    assert tuple(part.shape) == shape
    parameter = torch.zeros(shape)
    parameter.data.copy_(part)
    assert traced.region == region
    assert traced.once
    assert not parameter.any(), "nothing is written while asking"


def test_nothing_is_taken_of_what_is_only_looked_at():
    traced, tensor = asked((8, 6))
    assert tensor.shape == (8, 6)
    assert tensor.narrow(0, 0, 2).dtype is torch.bfloat16
    assert traced.region is None
    assert not traced.once


def test_two_copies_take_the_box_around_both():
    traced, tensor = asked((8, 6))
    torch.zeros(2, 6).copy_(tensor[1:3])
    torch.zeros(1, 6).copy_(tensor[6:7])
    assert traced.region == ((1, 7), (0, 6))
    assert not traced.once


def test_an_assignment_into_one_expert_is_a_copy():
    traced, tensor = asked((1,), torch.float32)
    scales = torch.zeros(4, 2)
    scales[3, 1] = tensor.reshape(())
    assert traced.region == ((0, 1),)


@pytest.mark.parametrize(
    "calculate",
    [
        lambda w: w + 1,
        lambda w: torch.cat([w[:1], w[1:2]]),
        lambda w: w[:2].float().sum().item(),
        lambda w: w.view(6, 8),
        lambda w: w[::2],
        lambda w: w.view(torch.uint8),
    ],
    ids=["arithmetic", "concatenation", "a value", "another shape", "a step", "another dtype"],
)
def test_what_is_no_plain_view_is_needed_whole(calculate):
    traced, tensor = asked((8, 6))
    calculate(tensor)
    assert traced.region == ((0, 8), (0, 6))
    assert not traced.once


def test_a_streamed_tensor_hands_its_copies_to_the_caller():
    seen = []
    traced = TensorTrace((8, 6))
    tensor = phantom_of(traced, torch.bfloat16, CPU, lambda target, phantom: seen.append((tuple(target.shape), phantom.region)))
    torch.zeros(3, 6).copy_(tensor.narrow(0, 2, 3))
    assert seen == [((3, 6), ((2, 5), (0, 6)))]


def test_a_streamed_tensor_cannot_be_calculated_with():
    tensor = phantom_of(TensorTrace((8, 6)), torch.bfloat16, CPU, lambda target, phantom: None)
    with pytest.raises(NotAView):
        tensor + 1
