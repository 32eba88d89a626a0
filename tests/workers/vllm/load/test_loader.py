from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.late import Late
from workers import plugin
from workers.load.reader import BLOCK_BYTES
from workers.quantization.formats import Format
from workers.vllm.load import config
from workers.vllm.load.config import quantization_config

loader = Late("workers.vllm.load.loader")
method = Late("workers.vllm.load.method")
pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(
        {
            "model.embed_tokens.weight": torch.zeros(128, 128, dtype=torch.bfloat16),
            "model.layers.0.mlp.up_proj.weight": torch.zeros(128, 128, dtype=torch.bfloat16),
            "model.layers.0.mlp.gate_proj.weight": torch.zeros(128, 128, dtype=torch.bfloat16),
        },
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 128}))
    return tmp_path


def arguments(folder: Path, quantize: Any = "nvfp4", **more: Any) -> SimpleNamespace:
    extra = {"quantize": quantize} if quantize is not None else {}
    given = {
        "model": str(folder),
        "hf_overrides": {},
        "quantization": None,
        "model_loader_extra_config": extra,
        "load_format": "spark_stream",
    }
    return SimpleNamespace(**(given | more))


def test_the_models_configuration_says_what_the_loader_makes(folder):
    plain = arguments(folder, "bf16")
    config.describe(plain)
    assert plain.hf_overrides == {}
    args = arguments(folder, hf_overrides={"rope_theta": 1.0})
    config.describe(args)
    described = args.hf_overrides["quantization_config"]
    assert args.hf_overrides["rope_theta"] == 1.0
    assert described["quant_method"] == "spark"
    assert method.formats_of(described) == [Format("nvfp4")]


@pytest.mark.parametrize(("cpu", "quantization", "ours"), [(True, None, True), (False, None, False), (True, "compressed-tensors", False)])
def test_what_was_quantized_elsewhere_in_a_format_of_ours_gets_our_kernels_on_a_cpu(folder, monkeypatch, cpu, quantization, ours):
    monkeypatch.setattr(config, "_is_cpu", lambda: cpu)
    said = quantization_config({"model.layers.0.mlp.up_proj": Format("int4", 128)}, [])
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 128, "quantization_config": said}))
    args = arguments(folder, None, quantization=quantization)
    config.describe(args)
    assert args.hf_overrides == ({"quantization_config": {**said, "quant_method": "spark"}} if ours else {})


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"quantize": "int3"}, "int3"),
        ({"quantization": "fp8"}, "--quantization fp8 .*`quantize`"),
        ({"model": "/no/such/folder/at/all"}, "/no/such/folder/at/all"),
        ({"model_loader_extra_config": {"quantise": "nvfp4"}}, "'quantise'"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_sentence(folder, args, sentence, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=sentence) as caught:
        config.describe(arguments(folder, **args))
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_failure_stands_in_the_progress_file(folder, tmp_path):
    (folder / "model.safetensors").write_bytes(b"\x08")
    path = tmp_path / "progress"
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        config.describe(arguments(folder, model_loader_extra_config={"quantize": "nvfp4", "progress": str(path)}))
    said = json.loads(path.read_text())["load"]
    assert said["phase"] == "failed"
    assert "model.safetensors" in said["failure"]
    assert said["failure_lasts"] is False, "the file may be whole the next time"

    scaleless = torch.zeros(128, 128, dtype=torch.float8_e4m3fn)
    save_file({"model.layers.0.mlp.up_proj.weight": scaleless}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.up_proj\.weight: "):
        config.describe(arguments(folder, model_loader_extra_config={"quantize": "nvfp4", "progress": str(path)}))
    assert json.loads(path.read_text())["load"]["failure_lasts"] is True, "what was read will not change"


def test_registering_twice_is_registering_once():
    plugin.register()
    described = Late("vllm.engine.arg_utils").EngineArgs.create_model_config
    plugin.register()
    assert Late("vllm.engine.arg_utils").EngineArgs.create_model_config is described


def test_the_loader_does_not_give_its_settings_to_vllms_own():
    made = loader.SparkStreamLoader(
        Late("vllm.config.load").LoadConfig(load_format="spark_stream", model_loader_extra_config={"quantize": "int4-g64"})
    )
    assert made.load_config.load_format == "safetensors"
    assert made.load_config.model_loader_extra_config == {}


def test_a_description_is_read_back_as_the_formats_it_was_made_from():
    forms = [Format("nvfp4"), Format("mxfp4"), Format("int4", 32), Format("nf4", 64), Format("fp8"), Format("fp8_block")]
    described = [quantization_config({"model.layers.0.mlp.up_proj": form}, ["lm_head"]) for form in forms]
    assert [method.formats_of(one) for one in described] == [[form] for form in forms]
    assert method.SparkConfig.from_config({**described[0], "quant_method": "spark"}).get_name() == "spark"
    assert [method.SparkConfig.override_quantization_method({"quant_method": name}, None) for name in ("spark", "fp8")] == ["spark", None]


def test_settings_are_frozen(folder):
    settings = loader.LoaderSettings.parse({"quantize": "nvfp4"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.cache_dir = "x"  # type: ignore[misc]


def test_the_rings_memory_is_what_the_documents_say() -> None:
    assert [blocks * BLOCK_BYTES for blocks in (loader.RING_BLOCKS, loader.CPU_RING_BLOCKS)] == [64 << 20, 32 << 20]
