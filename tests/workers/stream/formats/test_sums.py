"""Group sums that do not depend on how a weight is cut, and the least of several errors."""

from __future__ import annotations

import pytest
import torch

from workers.stream.formats.sums import columns, least, squared_distance


def in_order(value: list[float]) -> torch.Tensor:
    """Neighbours within eight, then halves; one float32 addition at a time."""
    left = [torch.tensor(one) for one in value]
    for _ in range(3):
        left = [a + b for a, b in zip(left[0::2], left[1::2], strict=True)]
    while len(left) > 1:
        left = [a + b for a, b in zip(left[: len(left) // 2], left[len(left) // 2 :], strict=True)]
    return left[0]


@pytest.mark.parametrize("size", [8, 128])
def test_the_order_is_the_same_for_every_number_of_groups(size: int) -> None:
    value = torch.randn(size, 37, generator=torch.Generator().manual_seed(size))
    together = columns(value.clone())
    assert torch.equal(together, torch.stack([in_order(value[:, group].tolist()) for group in range(37)]))
    for group in range(37):
        assert torch.equal(columns(value[:, group : group + 1].clone()), together[group : group + 1])


def test_squared_distance() -> None:
    value, other = torch.arange(16.0).view(8, 2), torch.ones(8, 2)
    assert squared_distance(value, other).tolist() == [sum((one - 1) ** 2 for one in range(start, 16, 2)) for start in (0, 1)]


def test_the_first_of_the_least() -> None:
    errors = torch.tensor([[3.0, 0.0, 5.0, 1.0], [1.0, 0.0, 4.0, 1.0], [1.0, 0.0, 4.0, 1e-9], [2.0, 1e-3, 4.0, float("inf")]])
    assert least(errors).tolist() == [1, 0, 1, 2]
