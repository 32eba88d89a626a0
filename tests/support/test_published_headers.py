"""The tensor lists of published models are theirs: they add up to the totals that others read from the real headers."""

from __future__ import annotations

from math import prod
from pathlib import Path

import yaml

from tests.support.published_headers import checkpoint_of

TOTALS = yaml.safe_load((Path(__file__).parents[1] / "fixtures" / "totals.yaml").read_text())


def test_the_tensors_of_published_models_add_up() -> None:
    counted = []
    for total in TOTALS:
        checkpoint = checkpoint_of(total["fixture"])
        elements = sum(prod(tensor.shape) for tensor in checkpoint.tensors.values())
        counted.append(checkpoint.total_bytes if total["what"] == "checkpoint_bytes" else elements)

    assert counted == [total["value"] for total in TOTALS]
    assert len(counted) > 10
