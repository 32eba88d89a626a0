"""Weights for the tests of the formats: three distributions, seeded, and what is hard for a quantizer. Never asserts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def distribution(name: str, n: int = 1024, k: int = 2048) -> Tensor:
    """bfloat16 [n, k]. name: gauss, laplace or t5."""
    random = np.random.default_rng(20260)
    match name:
        case "laplace":
            weight = random.laplace(size=(n, k))
        case "t5":
            weight = random.standard_t(5, size=(n, k))
        case _:
            weight = random.standard_normal((n, k))
    return torch.from_numpy(weight * 0.02).bfloat16()


def adversarial(dtype: torch.dtype, k: int = 256) -> dict[str, Tensor]:
    """Weights [8, k] that break a careless quantizer: name -> weight."""
    random = np.random.default_rng(7)
    limits = torch.finfo(dtype)
    plain = torch.from_numpy(random.standard_normal((8, k))).float()
    lone = torch.zeros(8, k)
    lone[:, 3] = 1.0
    spike = plain * 1e-3
    spike[2, 5] = -1e3
    ties = torch.from_numpy(random.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -2.5, -5.0], size=(8, k))).float()
    rows = plain * torch.logspace(-30, 4, 8).unsqueeze(1)
    made = {
        "zeros": torch.zeros(8, k),
        "negative-zeros": -torch.zeros(8, k),
        "zero-groups": plain * (torch.arange(k) // 16 % 2),
        "denormals": plain.clamp(-1, 1) * (limits.tiny / 2),
        "smallest": torch.full((8, k), limits.smallest_normal),
        "huge": plain.clamp(-1, 1) * (limits.max / 4),
        "largest": torch.full((8, k), limits.max / 4),
        "lone": lone,
        "spike": spike,
        "ties": ties,
        "equal": torch.full((8, k), -0.7),
        "rows-apart": rows,
    }
    return {name: weight.to(dtype) for name, weight in made.items()}


def bits(parts: Mapping[str, Tensor]) -> dict[str, NDArray]:
    """Parts as numpy arrays; types that numpy does not have as their bits."""
    unsigned = {torch.float8_e4m3fn: torch.uint8, torch.bfloat16: torch.uint16}
    return {suffix: part.view(unsigned.get(part.dtype, part.dtype)).numpy() for suffix, part in parts.items()}
