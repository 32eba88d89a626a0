"""E2M1: rounding as the hardware does it, and the bits of its codes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.workers.load import reference
from workers.load.formats import e2m1

TIES = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def rounded(*values: float) -> list[float]:
    codes = e2m1.encode(torch.tensor(values, dtype=torch.float32))
    return [float(reference.E2M1[code]) for code in codes.tolist()]


def test_the_grid_is_the_specified_one() -> None:
    assert e2m1.MAGNITUDES == GRID == tuple(reference.E2M1[:8].tolist())
    assert tuple(reference.E2M1.tolist()) == e2m1.VALUES


@pytest.mark.parametrize("tie", TIES)
def test_a_tie_goes_to_the_even_code_and_its_neighbours_to_the_nearest_value(tie: float) -> None:
    below = max(value for value in GRID if value < tie)
    above = min(value for value in GRID if value > tie)
    single = np.float32(tie)
    assert rounded(tie, np.nextafter(single, np.float32(0)), np.nextafter(single, np.float32(9))) == [TIES[tie], below, above]
    assert rounded(-tie, -np.nextafter(single, np.float32(0)), -np.nextafter(single, np.float32(9))) == [-TIES[tie], -below, -above]


def test_every_bfloat16_is_rounded_as_the_reference_rounds_it() -> None:
    value = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    value = value[~value.isnan()]
    assert np.array_equal(e2m1.encode(value).numpy(), reference.encode_e2m1(value.double().numpy()))
