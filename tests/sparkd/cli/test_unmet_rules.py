"""Rules of `quantize` that match no weight of the checkpoint: a check, a plan and a listing of its layers say the same of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkd.capacity.layers import layers_of
from sparkd.checkpoint import read_checkpoint
from sparkd.cli.config_check import check
from sparkd.config.config import load_config
from tests.support.checkpoints import dense, write
from tests.support.plans import entry_with, planned
from tests.support.published_tensors import tensors_of
from workers.quantization.recipe import QuantizationRecipe

MISTYPED = {"format": "nvfp4", "layers": [{"match": "o_porj", "format": "fp8"}, {"match": "down_proj", "format": "fp8"}]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", dense(num_hidden_layers=2), tensors_of(dense(num_hidden_layers=2)))


def test_a_rule_that_matches_no_weight_is_named_by_check_plan_and_listing(model: Path, tmp_path: Path) -> None:
    (sentence,) = layers_of(read_checkpoint(str(model)), QuantizationRecipe.parse(MISTYPED)).notes
    file = tmp_path / "sparkd.yaml"
    file.write_text(f"models:\n  m:\n    model: {model}\n    quantize: {MISTYPED}\n")
    config = load_config(file, environ={})

    (problem,) = check(file, {})
    assert (problem.severity, problem.line, problem.message) == ("warning", 4, f"models.m: {sentence}")

    for plan in (planned(model, quantize=MISTYPED), planned(entry_with(config.models["m"], config))):
        assert plan["notes"].count(sentence) == 1
