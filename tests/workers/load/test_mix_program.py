"""What the program measures of a small model: errors in the order of the formats, sensitivities of every unit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparkd.checkpoint import read_checkpoint
from tests.support.architectures import HIDDEN, PRESETS, write_qwen3_moe
from tests.support.published_stored import FP8_BLOCK
from workers.load import mix_program
from workers.quantization.formats import ERRORS
from workers.quantization.units import UnitList, units_of

SMALLEST = {**PRESETS["smallest"], "num_hidden_layers": 2}
PLENTY = 1 << 40


@pytest.fixture(scope="module", params=[None, pytest.param(FP8_BLOCK, marks=pytest.mark.rest)], ids=["bf16", "fp8-block"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mix") / "m"
    write_qwen3_moe(made, **SMALLEST, source=request.param)
    return made


def test_the_error_of_random_weights_is_that_of_each_format(folder: Path) -> None:
    errors = mix_program.measure(str(folder), 0)["errors"]
    listed = units_of(read_checkpoint(folder))
    assert list(errors) == [unit.key for unit in listed.units]
    for unit in listed.units:
        for spelling, error in errors[unit.key].items():
            assert error**0.5 == pytest.approx(ERRORS[spelling], rel=0.1), (unit.key, spelling)


def test_without_memory_the_model_is_not_run(folder: Path) -> None:
    assert mix_program.measure(str(folder), 0)["sensitivities"] == {}


def running_model(folder: Path) -> tuple[mix_program._Running, UnitList]:
    """A small mixture of experts in transformers, and its units."""
    write_qwen3_moe(folder, **SMALLEST)
    checkpoint = read_checkpoint(folder)
    running = mix_program._Running.of(checkpoint, PLENTY)
    assert running is not None
    return running, units_of(checkpoint)


def test_every_unit_of_a_model_that_runs_has_a_sensitivity(tmp_path: Path) -> None:
    write_qwen3_moe(tmp_path / "m", **SMALLEST)
    reported: list[tuple[int, int]] = []
    found = mix_program.measure(str(tmp_path / "m"), PLENTY, lambda done, total: reported.append((done, total)))
    keys = [unit.key for unit in units_of(read_checkpoint(tmp_path / "m")).units]
    assert list(found["sensitivities"]) == keys
    assert all(value >= 0 for value in found["sensitivities"].values())
    assert max(found["sensitivities"].values()) > 0
    assert reported == [(number, len(keys)) for number in range(len(keys))]


def test_a_unit_alone_is_changed_and_put_back(tmp_path: Path) -> None:
    """The first unit again after all others gives the same, and no unit gives what the unchanged model gives."""
    running, listed = running_model(tmp_path / "m")
    running.moments(listed)
    form = mix_program.Format.parse("mxfp4")

    def all_of_them() -> list[float]:
        return [running.divergence(unit, running.parameters(unit), form) for unit in listed.units]

    first = all_of_them()
    assert first == all_of_them()
    assert all(value > 0 for value in first)


def test_a_layer_before_the_unit_is_not_computed_again(tmp_path: Path) -> None:
    """Its output is that of the unchanged model, so a unit of the last layer diverges as if all layers had been computed."""
    running, listed = running_model(tmp_path / "m")
    running.moments(listed)
    last = listed.units[-1]
    form = mix_program.Format.parse("mxfp4")
    short = running.divergence(last, running.parameters(last), form)
    running._outputs.clear()
    assert short == pytest.approx(running.divergence(last, running.parameters(last), form), rel=1e-3)


def test_each_channel_counts_with_its_second_moment(tmp_path: Path) -> None:
    running, listed = running_model(tmp_path / "m")
    moments = running.moments(listed)
    moment = moments["model.layers.0.self_attn.q_proj"]
    assert moment.shape == (HIDDEN,)
    assert bool(torch.all(moment > 0))
