"""Rules of `quantize` that match no weight of the checkpoint: a check, a plan and a listing of its layers say the same of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkd.capacity.layers import listing
from sparkd.capacity.plan_for_checkpoint import answer
from sparkd.capacity.plan_for_entry import PlannedEntry, entry_of
from sparkd.capacity.plan_request import PlanRequest
from sparkd.checkpoint import Checkpoint, read_checkpoint
from sparkd.cli.config_check import check
from sparkd.config.config import load_config
from sparkd.hardware import SPARK
from tests.support.checkpoints import dense, write
from tests.support.published_tensors import tensors_of
from workers.quantization.recipe import QuantizationRecipe

MISTYPED = {"format": "nvfp4", "layers": [{"match": "o_porj", "format": "fp8"}, {"match": "down_proj", "format": "fp8"}]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", dense(num_hidden_layers=2), tensors_of(dense(num_hidden_layers=2)))


def test_a_rule_that_matches_no_weight_is_named_by_check_plan_and_listing(model: Path, tmp_path: Path) -> None:
    (sentence,) = listing(read_checkpoint(str(model)), QuantizationRecipe.parse(MISTYPED)).notes
    file = tmp_path / "sparkd.yaml"
    file.write_text(f"models:\n  m:\n    model: {model}\n    quantize: {MISTYPED}\n")
    config = load_config(file, environ={})

    (problem,) = check(file, {})
    assert (problem.severity, problem.line, problem.message) == ("warning", 4, f"models.m: {sentence}")

    def read(name: str) -> tuple[str, Checkpoint, PlannedEntry | None]:
        return name, read_checkpoint(str(model)), entry_of(config.models["m"], config) if name == "m" else None

    planned = answer(PlanRequest(str(model), quantize=MISTYPED), SPARK, read)
    of_entry = answer(PlanRequest("m"), SPARK, read)
    assert planned["notes"].count(sentence) == of_entry["notes"].count(sentence) == 1
