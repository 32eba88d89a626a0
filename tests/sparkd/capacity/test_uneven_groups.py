"""Groups that do not divide a layer's columns: a check, a plan and a listing of layers name the same formats that would fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sparkd.capacity.entry_faults import format_fault
from sparkd.capacity.layers import layers_of
from sparkd.checkpoint import read_checkpoint
from sparkd.config.config import Config, load_config
from sparkd.config.engine_args import engine_args
from sparkd.vllm.ask.answers import ModelAnswer, ModelQuestion, ModelRefusal
from tests.sparkd.capacity.test_evidence import answer as vllm_answer
from tests.support.checkpoints import dense, write
from tests.support.plans import entry_with, planned
from tests.support.published_tensors import tensors_of
from workers.quantization.recipe import QuantizationRecipe

# No group above 64 divides 576 columns.
CONFIG = dense(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536)
FITS = {"nf4-g512": "nf4-g64 or nf4-g32", "int4-g128": "int4-g64 or int4-g32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("uneven") / "m", CONFIG, tensors_of(CONFIG))


def refuses(questions: Sequence[ModelQuestion]) -> list[ModelAnswer | None]:
    """A vLLM that takes none of it, and does not say what it would take."""
    refused = ModelRefusal("model", "ValueError", "576 is not divisible by group size 128", certain=True)
    return [vllm_answer(refusal=refused) for _ in questions]


def configured(folder: Path, quantize: Any) -> Config:
    entry = {"model": str(folder), "max_model_len": 4096, "quantize": quantize}
    return load_config(None, flags={"models": {"m": entry}, "state_dir": str(folder.parent / "state")}, environ={})


def only_names(fits: str, sentence: str | None) -> bool:
    """Whether a sentence names these formats and no others with groups, but for the one that does not fit."""
    assert sentence is not None
    rest = sentence.replace(fits, "")
    return fits in sentence and not {"nf4-g64", "nf4-g32", "int4-g64", "int4-g32"} & set(rest.replace(".", " ").split())


@pytest.mark.parametrize(("spelling", "fits"), FITS.items())
def test_the_same_formats_are_named_everywhere(spelling: str, fits: str, folder: Path) -> None:
    config = configured(folder, spelling)
    (spec,) = config.models.values()
    assert only_names(fits, format_fault(engine_args(spec, {})))

    plans = [
        planned(entry_with(spec, config)),
        planned(folder, quantize=spelling),
        planned(folder, quantize=spelling, ask=refuses),
    ]
    for plan in plans:
        assert plan["refusal"]["cause"] == "format"
        assert only_names(fits, plan["refusal"]["message"])
        assert not any("quantize" in note for note in plan["notes"]), "another cure"

    (note,) = layers_of(read_checkpoint(folder), QuantizationRecipe.parse(spelling)).notes
    assert only_names(fits, note)
