"""The calibration of nvfp4-a4 in a plan: its seconds and its memory, once for a checkpoint and a text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkd.capacity.footprint import CHILD_S
from sparkd.checkpoint import read_checkpoint
from sparkd.config.config import QuantizedCache, load_config
from sparkd.hardware import SPARK, Hardware
from sparkd.units import GIB
from tests.support import plans
from tests.support.checkpoints import dense, write
from tests.support.facts import facts
from tests.support.published_tensors import tensors_of
from workers.quantization.calibration_file import BESIDE_BYTES, SPARE_BYTES, calibration_file
from workers.quantization.calibration_text import text_of

LARGE = dense(num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("calibrated") / "m", LARGE, tensors_of(LARGE))


def planned(folder: Path, quantize: Any, cache: Path | None = None, hardware: Hardware = SPARK) -> dict[str, Any]:
    config = plans.NOWHERE if cache is None else plans.NOWHERE.model_copy(update={"quantized_cache": QuantizedCache(dir=cache)})
    return plans.planned(plans.entry_for(str(folder), config), hardware, max_model_len=4096, quantize=quantize)


def keep(folder: Path, cache: Path, text: str | None = None, content: str = '{"a": 1.0}') -> None:
    file = calibration_file(str(cache), read_checkpoint(folder), text_of(text))
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)


def test_the_first_load_reads_the_model_once_more_and_starts_a_child(folder: Path) -> None:
    plain, calibrated = (planned(folder, format_)["choice"]["footprint"] for format_ in ("nvfp4", "nvfp4-a4"))
    stored = read_checkpoint(folder).total_bytes
    assert plain["calibration_s"] is None and plain["calibration_free"] == 0
    assert calibrated["calibration_s"] - CHILD_S == pytest.approx(stored / (SPARK.disk_bytes_s or 0))
    assert calibrated["first_load_s"] - plain["first_load_s"] == pytest.approx(calibrated["calibration_s"])
    assert calibrated["next_load_s"] == pytest.approx(plain["next_load_s"], rel=1e-3)
    assert calibrated["calibration_free"] == stored + 12 * GIB == stored + BESIDE_BYTES + SPARE_BYTES


def test_what_is_kept_is_counted_no_more(folder: Path, tmp_path: Path) -> None:
    keep(folder, tmp_path, content="")
    assert planned(folder, "nvfp4-a4", tmp_path)["choice"]["footprint"]["calibration_s"] > 0, "a load that measures has it open"
    keep(folder, tmp_path)
    plan = planned(folder, "nvfp4-a4", tmp_path)
    assert plan["choice"]["footprint"]["calibration_s"] is None
    assert not any("calibrated" in note for note in plan["notes"])


def test_another_text_is_another_calibration(folder: Path, tmp_path: Path) -> None:
    keep(folder, tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("All work and no play. " * 100)
    recipe = {"format": "nvfp4-a4", "calibration": str(text)}
    assert planned(folder, recipe, tmp_path)["choice"]["footprint"]["calibration_s"] > 0
    keep(folder, tmp_path, str(text))
    assert planned(folder, recipe, tmp_path)["choice"]["footprint"]["calibration_s"] is None


def test_an_entry_keeps_it_in_its_own_folder_or_nowhere(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "quantized"
    cache.mkdir()
    keep(folder, cache)
    entry = {"model": str(folder), "max_model_len": 4096, "quantize": "nvfp4-a4"}
    models = {"kept": entry, "bare": entry | {"quantized_cache": False}}
    config = load_config(None, flags={"models": models, "state_dir": str(tmp_path)}, environ={})
    seconds = []
    for spec in config.models.values():
        plan = plans.planned(plans.entry_with(spec, config))
        seconds.append(plan["choice"]["footprint"]["calibration_s"])
    assert seconds[0] is None and seconds[1] > 0


def test_a_node_without_the_memory_does_not_calibrate(folder: Path) -> None:
    stored = read_checkpoint(folder).total_bytes
    held = planned(folder, "nvfp4-a4")["choice"]["footprint"]["weights"]
    enough = replace(SPARK, memory_bytes=SPARK.system_bytes + stored + 12 * GIB + held)
    assert planned(folder, "nvfp4-a4", hardware=enough)["choice"]["footprint"]["calibration_s"] > 0
    small = replace(enough, memory_bytes=enough.memory_bytes - 1)
    plan = planned(folder, "nvfp4-a4", hardware=small)
    plain = planned(folder, "nvfp4", hardware=small)
    assert plan["choice"]["footprint"]["first_load_s"] == pytest.approx(plain["choice"]["footprint"]["first_load_s"], rel=1e-3)
    (note,) = (note for note in plan["notes"] if "calibrated" in note)
    assert f"{(stored + 12 * GIB) / GIB:.1f}" in facts(note) and "nvfp4" in facts(note)
