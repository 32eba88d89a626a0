"""How answers are compared with those of the unquantized model."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import kl_div

from workers.load.reference_model import divergence


@pytest.mark.parametrize("tokens", [1, 128, 300])
def test_a_divergence_is_the_mean_over_the_tokens_whatever_their_number(tokens: int) -> None:
    generator = torch.Generator().manual_seed(7)
    reference, other = (torch.randn(tokens, 50, generator=generator).log_softmax(-1) for _ in range(2))
    assert divergence(reference, other) == pytest.approx(float(kl_div(other, reference, reduction="batchmean", log_target=True)), rel=1e-5)
    assert divergence(reference, reference) == 0.0
