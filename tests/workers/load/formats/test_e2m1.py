"""E2M1: rounding as the hardware does it, the bits of its codes, and their packing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.load import reference
from workers.load.formats import e2m1
from workers.load.formats.groups import pack

TIES = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode(value: Tensor) -> Tensor:
    kept = value.clone()
    return e2m1.encode(kept, torch.empty_like(kept), torch.empty_like(kept))


def rounded(*values: float) -> list[float]:
    codes = encode(torch.tensor(values, dtype=torch.float32))
    return [float(reference.E2M1[code]) for code in codes.tolist()]


def test_the_grid_is_the_specified_one() -> None:
    assert e2m1.VALUES == GRID == tuple(reference.E2M1[:8].tolist())
    assert reference.E2M1[8:].tolist() == [-value for value in GRID]


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
    assert np.array_equal(encode(value).numpy(), reference.encode_e2m1(value.double().numpy()))


def test_the_error_is_the_squared_distance_to_the_nearest_value() -> None:
    magnitude = torch.cat([torch.linspace(0, 20, 4081), torch.tensor([*TIES, *GRID])]).view(16, -1)
    for saturate, limit in ((True, 20.0), (False, 6.99)):
        value = magnitude.clamp(max=limit)
        found = e2m1.squared_error(value.clone(), torch.empty_like(value), torch.empty_like(value), saturate=saturate)
        exact = value.double().numpy()
        distance = reference.E2M1[reference.encode_e2m1(exact)] - exact
        assert np.allclose(found.double().numpy(), (distance**2).sum(0), rtol=1e-5)


def test_codes_are_packed_with_the_even_column_in_the_low_nibble() -> None:
    codes = torch.arange(16, dtype=torch.int32).unsqueeze(1).repeat(1, 3)
    packed = pack(codes).view(torch.uint8)
    assert packed.shape == (3, 8)
    assert packed[1].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert e2m1.decode(packed)[2].tolist() == [float(value) for value in reference.E2M1]
