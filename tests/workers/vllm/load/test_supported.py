from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from sparkd.checkpoint import read_checkpoint
from sparkd.errors import CheckpointError
from tests.support import architectures, checkpoints
from workers.quantization.recipe import QuantizationRecipe
from workers.vllm.load import config


@pytest.mark.parametrize(("quantize", "on_cpu", "refused"), [("fp8-block", False, True), ("fp8-block", True, False), ("fp8", False, False)])
def test_blocks_that_a_gpus_kernels_cannot_cut_are_refused_by_name(tmp_path, monkeypatch, quantize, on_cpu, refused):
    monkeypatch.setattr(config, "_is_cpu", lambda: on_cpu)
    model = architectures.llama(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536)
    checkpoint = read_checkpoint(checkpoints.write_checkpoint(tmp_path / "m", model.config, model.entries))
    formats = QuantizationRecipe.parse(quantize).assign(checkpoint)
    if not refused:
        config.refuse_unserved(checkpoint, formats, 1)
        return
    with pytest.raises(CheckpointError, match=r"K=576 .* 128.*fp8-block") as raised:
        config.refuse_unserved(checkpoint, formats, 1)
    assert raised.value.tensor is not None


def test_a_missing_symbol_ends_the_start_with_that_sentence_alone(one_rank, tmp_path, monkeypatch):
    model = architectures.ARCHITECTURES["gpt_oss-bf16"]()
    folder = checkpoints.write_checkpoint(tmp_path / "m", model.config, model.entries)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.gpt_oss", None)
    settings = {"quantize": "nvfp4", "progress": str(tmp_path / "progress")}
    arguments = SimpleNamespace(model=str(folder), hf_overrides={}, quantization=None, model_loader_extra_config=settings)
    with pytest.raises(ValueError, match=r" vllm\.model_executor\.models\.gpt_oss") as caught:
        config.describe(arguments)
    assert caught.value.__cause__ is None
    assert "vllm.model_executor.models.gpt_oss" in (tmp_path / "progress").read_text()
