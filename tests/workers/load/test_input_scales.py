"""The divisors of layers with 4-bit activations: measured over a text in transformers, kept, and loaded into vLLM's own layers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkd.checkpoint import read_checkpoint
from sparkd.errors import CheckpointError, ConfigError
from tests.support.architectures import ARCHITECTURES, PRESETS, write_qwen3_moe
from tests.support.checkpoints import MIB, checkpoint_of, write_checkpoint
from tests.support.facts import facts
from tests.workers.load.loading import load
from workers import plugin
from workers.cache.store import entries
from workers.load import input_scales
from workers.load.input_scales import FOLDER, LARGEST, UNMEASURED, InputScales, divisor_of, measured
from workers.load.virtual import VirtualCheckpoint
from workers.quantization.calibration_text import MOST_BYTES, text_of
from workers.quantization.formats import Format
from workers.quantization.recipe import QuantizationRecipe
from workers.vllm.export import ExportRequest, export
from workers.vllm.load import calibration_program

PLENTY = 1 << 40
LAYER = "model.layers.0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "m"
    write_qwen3_moe(made, **PRESETS["smallest"])
    return made


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that were measured; all have the same two experts' products and query."""
    folders: list[str] = []

    def measure(checkpoint: Any, _text: str) -> Mapping[str, float]:
        folders.append(checkpoint.folder)
        return {f"{LAYER}.mlp.experts.gate_up_proj": 5.0, f"{LAYER}.mlp.experts.down_proj": 300.0, f"{LAYER}.self_attn.q_proj": 2.0}

    monkeypatch.setattr(input_scales, "_measured", measure)
    return folders


@pytest.mark.parametrize("largest", [1e-6, 0.3, 1.0, 3037.2])
def test_a_divisor_is_a_power_of_two_with_room_for_twice_the_largest(largest: float) -> None:
    divisor = divisor_of(largest)
    assert torch.frexp(torch.tensor(divisor)).mantissa == 0.5
    assert largest * 2 <= LARGEST / divisor < largest * 4
    assert divisor_of(0.0) == divisor_of(float("nan")) == divisor_of(float("inf")) == UNMEASURED


def test_the_program_sees_the_input_of_every_layer(folder: Path) -> None:
    found = calibration_program.largest_inputs(str(folder), PLENTY, text_of(None))
    assert found.keys() == {
        *(f"{LAYER}.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj", "o_proj")),
        f"{LAYER}.mlp.gate",
        f"{LAYER}.mlp.experts.gate_up_proj",
        f"{LAYER}.mlp.experts.down_proj",
        "lm_head",
    }
    assert found[f"{LAYER}.self_attn.q_proj"] == found[f"{LAYER}.self_attn.k_proj"]
    assert all(value > 0 for value in found.values())
    # A token's experts get what its router gets, and no expert here was without tokens.
    assert found[f"{LAYER}.mlp.experts.gate_up_proj"] == found[f"{LAYER}.mlp.gate"]


def test_a_model_that_does_not_fit_is_not_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert calibration_program.largest_inputs(str(folder), 1 << 30, text_of(None)) == {}
    assert "GiB" in capfd.readouterr().err


def test_the_program_as_a_child_gives_the_same(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_scales, "mem_available_bytes", lambda: PLENTY)  # whatever this machine has free
    made = measured(read_checkpoint(folder), text_of(None), str(tmp_path)).of
    found = calibration_program.largest_inputs(str(folder), PLENTY, text_of(None))
    assert made(f"{LAYER}.self_attn.o_proj") == divisor_of(found[f"{LAYER}.self_attn.o_proj"])
    (kept,) = (tmp_path / FOLDER).iterdir()
    assert json.loads(kept.read_text()) == pytest.approx(found)


@pytest.mark.parametrize("leaf", ["gate_proj", "w3", "down_proj", "w2"])
def test_all_experts_of_a_layer_have_one_divisor_for_each_product(leaf: str, folder: Path, seen: list[str]) -> None:
    made = measured(read_checkpoint(folder), "a text", None).of
    largest = 300.0 if leaf in ("down_proj", "w2") else 5.0
    assert made(f"{LAYER}.mlp.experts.3.{leaf}") == divisor_of(largest)
    assert made(f"{LAYER}.block_sparse_moe.experts.0.{leaf}") == divisor_of(largest)
    assert made(f"model.layers.1.mlp.experts.3.{leaf}") == divisor_of(largest)


NAMES = {
    "model.layers.0.self_attn.q_proj": ("model.language_model.layers.0.self_attn.q_proj", "language_model.model.layers.0.self_attn.q_proj"),
    "backbone.layers.1.mixer.in_proj": ("model.layers.1.mixer.in_proj",),
    "model.language_model.layers.2.mlp.experts.down_proj": ("model.layers.2.mlp.experts.7.down_proj", "model.layers.2.mlp.experts.w2"),
}


@pytest.mark.parametrize(("measured_name", "names"), NAMES.items())
def test_a_language_model_is_found_under_each_of_its_names(measured_name: str, names: tuple[str, ...]) -> None:
    scales = InputScales({measured_name: 3.0})
    assert {scales.of(name) for name in names} == {divisor_of(3.0)}
    assert not scales.unmeasured(names)


def test_a_layer_of_another_part_gets_the_largest_of_its_kind() -> None:
    part = "visual"
    scales = InputScales({f"model.layers.{layer}.self_attn.q_proj": float(layer + 1) for layer in range(3)})
    assert scales.of(f"{part}.layers.0.self_attn.q_proj") == divisor_of(3.0)
    assert scales.of(f"{part}.layers.0.mixer.in_proj") == UNMEASURED
    assert scales.unmeasured([f"{part}.layers.0.self_attn.q_proj", f"{part}.layers.0.mixer.in_proj"]) == 1
    leaves = ("gate_proj", "up_proj", "down_proj")
    experts = [f"model.layers.{layer}.mlp.experts.{number}.{leaf}" for layer in range(3) for number in range(8) for leaf in leaves]
    assert scales.unmeasured(experts) == 3 * 2, "all experts of a layer are one module for each product"


REST = [pytest.param(name, marks=pytest.mark.rest) for name in ("gemma3", "deepseek_v3", "granitemoehybrid", "qwen3_next-mtp")]


@pytest.mark.parametrize("name", ["nemotron_h", *REST])
def test_every_layer_of_an_architecture_is_measured(name: str, tmp_path: Path) -> None:
    model = ARCHITECTURES[name]()
    checkpoint = read_checkpoint(write_checkpoint(tmp_path / "m", model.config, model.entries, shard_bytes=8 * MIB))
    scales = InputScales(calibration_program.largest_inputs(checkpoint.folder, PLENTY, text_of(None)[:2000]))
    formats = QuantizationRecipe.parse("nvfp4-a4").assign(checkpoint)
    modules = list(VirtualCheckpoint(checkpoint, formats).rounded_inputs)
    assert modules
    assert not scales.unmeasured(modules)


def test_a_program_that_dies_is_named_and_the_load_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(input_scales, "module_command", lambda python, _module: [python, "-c", script])
    assert measured(read_checkpoint(folder), "a text", None).of(f"{LAYER}.self_attn.q_proj") == UNMEASURED
    assert "signal 9" in caplog.text


def test_a_checkpoint_is_measured_once_for_each_text_and_again_where_it_or_the_file_changed(tmp_path: Path, seen: list[str]) -> None:
    model = tmp_path / "m"
    write_qwen3_moe(model, **PRESETS["smallest"])

    def measurements(text: str) -> int:
        assert measured(read_checkpoint(model), text, str(tmp_path)).of(f"{LAYER}.self_attn.q_proj") == divisor_of(2.0)
        return len(seen)

    assert [measurements(text) for text in ("a text", "a text", "another")] == [1, 1, 2]
    for kept in (tmp_path / FOLDER).iterdir():
        kept.write_text('{"a": ')
    assert [measurements("a text") for _ in range(2)] == [3, 3]
    for shard in model.glob("*.safetensors"):
        os.utime(shard, (1, 1))
    assert measurements("a text") == 4


def test_a_measurement_that_failed_is_tried_again_and_kept_nowhere(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[dict[str, float]] = [{}, {f"{LAYER}.self_attn.q_proj": 2.0}]
    monkeypatch.setattr(input_scales, "_measured", lambda *_: answers.pop(0))
    divisors = [measured(read_checkpoint(folder), "a text", str(tmp_path)).of(f"{LAYER}.self_attn.q_proj") for _ in range(3)]
    assert divisors == [UNMEASURED, divisor_of(2.0), divisor_of(2.0)]


def test_a_folder_that_cannot_be_written_keeps_nothing(folder: Path, tmp_path: Path, seen: list[str]) -> None:
    (tmp_path / "file").write_text("")
    assert measured(read_checkpoint(folder), "a text", str(tmp_path / "file")).of(f"{LAYER}.self_attn.q_proj") == divisor_of(2.0)


@pytest.fixture
def loaded(one_rank: None) -> Callable[..., Any]:
    plugin.register()
    return partial(load, process=True)


def test_vllm_gets_them_from_the_checkpoint_and_from_the_cache(
    folder: Path, tmp_path: Path, seen: list[str], loaded: Callable[..., Any]
) -> None:
    settings = {"quantize": "nvfp4-a4", "cache_dir": str(tmp_path)}
    first = dict(loaded(folder, settings).named_parameters())
    # k and v have no figure here, and the layer takes the largest.
    assert first[f"{LAYER}.self_attn.qkv_proj.input_global_scale"].tolist() == [divisor_of(2.0)]
    (up,) = (tensor for name, tensor in first.items() if name.endswith("w13_input_global_scale"))
    (down,) = (tensor for name, tensor in first.items() if name.endswith("w2_input_global_scale"))
    assert (len(entries(str(tmp_path))), len(list((tmp_path / FOLDER).iterdir()))) == (1, 1)
    assert (up == divisor_of(5.0)).all()
    assert (down == divisor_of(300.0)).all()

    out = tmp_path / "out"
    request = ExportRequest(str(folder), QuantizationRecipe.parse("nvfp4-a4").canonical(), str(out), str(tmp_path), "cpu")
    assert export(request, lambda *_: None)[0] in ("cache", "checkpoint")
    stored = read_checkpoint(out)
    assert stored.quantization is not None and stored.quantization.method == "nvfp4-a4"
    assert f"{LAYER}.mlp.experts.1.down_proj.input_global_scale" in stored.tensors
    again = dict(loaded(folder, settings).named_parameters())
    for name, tensor in first.items():
        assert torch.equal(again[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name
    assert len(seen) == 1
    # What sparkd exports it serves again, on a CPU too, for which vLLM has no kernel of this format.
    exported = dict(loaded(out, {"quantize": "bf16"}).named_parameters())
    for name, tensor in first.items():
        assert torch.equal(exported[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


def test_without_a_cache_ranks_find_them_at_home_and_none_waits_for_another(
    folder: Path, tmp_path: Path, seen: list[str], loaded: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.parallel_state import GroupCoordinator

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.delattr(GroupCoordinator, "broadcast_object")
    for _rank in range(2):
        layers = dict(loaded(folder, {"quantize": "nvfp4-a4", "cache_dir": None}).named_parameters())
        assert layers[f"{LAYER}.self_attn.qkv_proj.input_global_scale"].tolist() == [divisor_of(2.0)]
    assert (len(seen), len(list((tmp_path / FOLDER).iterdir())), entries(str(tmp_path))) == (1, 1, [])


UNUSABLE = {"none": None, "short": b"short", "binary": b"\xff" * 5000, "huge": b"x" * (MOST_BYTES + 1)}


@pytest.mark.parametrize("data", UNUSABLE.values(), ids=UNUSABLE)
def test_a_text_that_cannot_be_used_is_refused_before_anything_is_read(data: bytes | None, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    if data is not None:
        path.write_bytes(data)
    recipe = QuantizationRecipe.parse({"format": "nvfp4-a4", "calibration": str(path)})
    with pytest.raises(CheckpointError) as refused:
        recipe.assign(read_checkpoint(folder))
    assert str(path) in facts(refused.value.message)


def test_a_calibration_is_a_path_of_a_format_that_has_one() -> None:
    for recipe in ({"format": "nvfp4-a4", "calibration": "text.txt"}, {"format": "nvfp4", "calibration": "/a"}):
        with pytest.raises(ConfigError):
            QuantizationRecipe.parse(recipe)
    recipe = QuantizationRecipe.parse({"layers": {"o_proj": "nvfp4-a4"}, "calibration": "/a"})
    assert QuantizationRecipe.parse(recipe.canonical()) == recipe
    # Latent attention keeps its activations.
    recipe = QuantizationRecipe.parse({"format": "nvfp4-a4", "layers": {"kv_b_proj": "nvfp4-a4"}})
    names = {name: f"{LAYER}.self_attn.{name}_proj" for name in ("kv_b", "q")}
    formats = recipe.assign(checkpoint_of({f"{module}.weight": ("BF16", (512, 256)) for module in names.values()}))
    assert formats == {names["kv_b"]: Format("nvfp4"), names["q"]: Format("nvfp4_a4")}
