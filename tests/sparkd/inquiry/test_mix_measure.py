"""A real child measures a checkpoint. The result is kept by the checkpoint's identity, and a part of it never is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sparkd.checkpoint import read_checkpoint
from sparkd.errors import EngineError
from sparkd.inquiry import mix_measure
from tests.support.architectures import PRESETS, write_qwen3_moe
from workers.kv.profiles import checkpoint_of
from workers.quantization.mix import UNMEASURED
from workers.quantization.units import units_of

PYTHON = Path(sys.executable)


@pytest.mark.parametrize("free_bytes", [0, pytest.param(1 << 40, marks=pytest.mark.rest)])
def test_a_child_measures_a_checkpoint_once_and_it_is_kept(free_bytes: int, tmp_path: Path) -> None:
    """Without memory for the model it compares weights alone; tests/workers/load/test_mix_program.py runs the model in one process."""
    model, kept = tmp_path / "m", tmp_path / "state" / "mixes"
    write_qwen3_moe(model, **PRESETS["smallest"])
    identity = checkpoint_of(str(model))
    assert mix_measure.kept_errors(identity, kept) is UNMEASURED
    heard: list[tuple[int, int]] = []
    found = mix_measure.measure(str(model), identity, PYTHON, kept, free_bytes, progress=lambda *step: heard.append(step))
    keys = [unit.key for unit in units_of(read_checkpoint(model)).units]
    assert list(found.errors) == keys and list(found.sensitivities) == (keys if free_bytes else [])
    assert not free_bytes or heard == [(number, len(keys)) for number in range(len(keys))]
    assert mix_measure.kept_errors(identity, kept) == found


def test_a_child_that_ends_without_an_answer_is_an_error_with_its_last_line(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\ncat > /dev/null\necho 'no header' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(EngineError, match="no header"):
        mix_measure.measure(str(tmp_path), "x", python, tmp_path / "mixes", 1 << 40)
    assert not (tmp_path / "mixes").exists()


def test_a_damaged_file_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    assert mix_measure.kept_errors("x", tmp_path) is UNMEASURED
