"""That the tensor lists of published models are theirs: they add up to the totals that others read from the real headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.published_headers import checkpoint_of, count_of

TOTALS = yaml.safe_load((Path(__file__).parents[1] / "fixtures" / "totals.yaml").read_text())
QUICK = ("Qwen3.5", "gpt-oss", "Gemma", "DeepSeek-V2", "Mistral", "GLM", "Nemotron-3-Nano")


@pytest.mark.parametrize(
    "total", [one for one in TOTALS if one["model"].startswith(QUICK)], ids=lambda one: f"{one['model']} {one['what']}"
)
def test_the_tensors_of_a_published_model_add_up(total: dict[str, Any]) -> None:
    assert count_of(total) == total["value"]


def test_a_way_to_store_a_model_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="fp4 is no way"):
        checkpoint_of("llama-3.1-8b", "fp4")
