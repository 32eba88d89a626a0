"""That the tensor lists of published models are theirs: they add up to the totals that others read from the real headers."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.support.published_headers import checkpoint_of, count_of

TOTALS = yaml.safe_load((Path(__file__).parents[1] / "fixtures" / "totals.yaml").read_text())
QUICK = ("Qwen3.5", "gpt-oss", "Gemma", "DeepSeek-V2", "Mistral", "GLM", "Nemotron-3-Nano")


def test_the_tensors_of_published_models_add_up() -> None:
    totals = [total for total in TOTALS if total["model"].startswith(QUICK)]
    assert len(totals) > 10
    assert [total["model"] for total in totals if count_of(total) != total["value"]] == []


def test_a_way_to_store_a_model_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="fp4 is no way"):
        checkpoint_of("llama-3.1-8b", "fp4")
