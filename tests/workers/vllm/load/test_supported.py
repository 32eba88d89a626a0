from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest

from sparkd.checkpoint import read_checkpoint
from sparkd.errors import CheckpointError, MissingSymbol
from tests.support import architectures, checkpoints
from tests.support.facts import facts
from workers.quantization.recipe import QuantizationRecipe
from workers.vllm.load import ranks, supported


@pytest.mark.parametrize(("quantize", "on_cpu", "refused"), [("fp8-block", False, True), ("fp8-block", True, False), ("fp8", False, False)])
def test_blocks_that_a_gpus_kernels_cannot_cut_are_refused_by_name(tmp_path, monkeypatch, quantize, on_cpu, refused):
    monkeypatch.setattr(supported, "_is_cpu", lambda: on_cpu)
    model = architectures.llama(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536)
    checkpoint = read_checkpoint(checkpoints.write_checkpoint(tmp_path / "m", model.config, model.entries))
    formats = QuantizationRecipe.parse(quantize).assign(checkpoint)
    if not refused:
        supported.refuse_unserved(checkpoint, formats, 1)
        return
    with pytest.raises(CheckpointError, match=r"K=576 .* 128.*fp8-block") as raised:
        supported.refuse_unserved(checkpoint, formats, 1)
    assert raised.value.tensor is not None


@pytest.mark.parametrize(
    ("quantize", "on_cpu", "counts", "refused"),
    [("mxfp4", False, False, True), ("mxfp4", False, True, False), ("mxfp4", True, False, False), ("nvfp4", False, False, False)],
)
def test_experts_without_a_gate_are_refused_where_the_kernel_wants_one(tmp_path, monkeypatch, quantize, on_cpu, counts, refused):
    monkeypatch.setattr(supported, "_is_cpu", lambda: on_cpu)
    monkeypatch.setattr(supported, "_mxfp4_counts_projections", lambda: counts)
    model = architectures.ARCHITECTURES["nemotron_h"]()
    checkpoint = read_checkpoint(checkpoints.write_checkpoint(tmp_path / "m", model.config, model.entries))
    formats = QuantizationRecipe.parse(quantize).assign(checkpoint)
    if not refused:
        supported.refuse_unserved(checkpoint, formats, 1)
        return
    with pytest.raises(CheckpointError, match=r"mxfp4 experts .*gate") as raised:
        supported.refuse_unserved(checkpoint, formats, 1)
    assert raised.value.tensor is not None and raised.value.tensor.endswith(".up_proj.weight")


_MOE = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"


@pytest.mark.parametrize(
    ("asked", "module", "attribute"),
    [
        (supported._taken, "vllm.model_executor.models.gpt_oss", None),
        (supported._is_cpu, "vllm.platforms", "current_platform"),
        (supported._mxfp4_counts_projections, f"{_MOE}.compressed_tensors_moe_w4a4_mxfp4", "CompressedTensorsW4A4Mxfp4MoEMethod"),
        (supported._int4_has_biases, f"{_MOE}.compressed_tensors_moe_wna16", None),
        (ranks.experts_are_spread, "vllm.config", "get_current_vllm_config"),
        (ranks.tensor_parallel_rank, "vllm.distributed", "get_tensor_model_parallel_rank"),
    ],
)
def test_a_symbol_that_a_release_lacks_is_named_with_release_and_cure(one_rank, monkeypatch, asked, module, attribute):
    class Less:
        """The module without that name."""

        def __getattr__(self, name):
            if name == attribute:
                raise AttributeError(name)
            return getattr(real, name)

    import vllm

    real = importlib.import_module(module)
    monkeypatch.setitem(sys.modules, module, None if attribute is None else Less())
    with pytest.raises(MissingSymbol) as caught:
        asked()
    said = caught.value.message
    assert facts(said).startswith(f"{vllm.__version__} {module}.{attribute or ''}")
    assert facts(said).endswith(" 0.26.0 0.32.0 quantize")


def test_a_missing_symbol_ends_the_start_with_that_sentence_alone(one_rank, tmp_path, monkeypatch):
    from workers.vllm.load import loader

    model = architectures.ARCHITECTURES["gpt_oss-bf16"]()
    folder = checkpoints.write_checkpoint(tmp_path / "m", model.config, model.entries)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.gpt_oss", None)
    settings = {"quantize": "int4", "progress": str(tmp_path / "progress")}
    arguments = SimpleNamespace(model=str(folder), hf_overrides={}, quantization=None, model_loader_extra_config=settings)
    with pytest.raises(ValueError, match=r" vllm\.model_executor\.models\.gpt_oss") as caught:
        loader.describe(arguments, {})
    assert caught.value.__cause__ is None
    assert "vllm.model_executor.models.gpt_oss" in (tmp_path / "progress").read_text()
