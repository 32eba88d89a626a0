"""An FP8 checkpoint that stays in FP8: vLLM's own parameters hold the source's codes and scales."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sparkd.checkpoint import read_checkpoint
from tests.support.architectures import llama, quantized
from tests.support.checkpoints import MIB, write_checkpoint
from tests.support.published_stored import FP8, FP8_BLOCK
from tests.workers.load.formats.test_fp8_source_load import codes, scale_beside, spread
from tests.workers.load.loading import load
from workers import plugin

FUSED_IN_VLLM = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "self_attn.o_proj": ("o_proj",),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.down_proj": ("down_proj",),
}


@pytest.mark.rest
@pytest.mark.parametrize(("kind", "quantize"), [(FP8_BLOCK, "fp8-block"), (FP8, "fp8")])
def test_they_hold_the_sources_codes(tmp_path: Path, one_rank: None, kind: Mapping[str, Any], quantize: str) -> None:
    """Through vLLM's model class and its loaders, q/k/v and gate/up in one parameter each, from the checkpoint and from the cache."""
    plugin.register()
    made = quantized(llama(), kind)
    folder = write_checkpoint(tmp_path / "m", made.config, made.entries, shard_bytes=MIB)
    stored = {name: tensor for shard in read_checkpoint(folder).shards for name, tensor in load_file(shard.path).items()}

    for source in ("checkpoint", "cache"):
        progress = tmp_path / source
        model = load(folder, {"quantize": quantize, "cache_dir": str(tmp_path / "cached"), "progress": str(progress)})
        assert json.loads(progress.read_text())["load"]["source"] == source
        parameters = dict(model.named_parameters())
        for layer, (fused, parts) in product(range(2), FUSED_IN_VLLM.items()):
            at = f"model.layers.{layer}.{fused.rpartition('.')[0]}"
            weights = {f"{at}.{part}": stored[f"{at}.{part}.weight"] for part in parts}
            parameter, scale = (parameters[f"model.layers.{layer}.{fused}.{suffix}"] for suffix in ("weight", "weight_scale"))
            assert torch.equal(codes(parameter), torch.cat([codes(weight) for weight in weights.values()]))
            meant = [weight.float() * spread(scale_beside(stored, name), *weight.shape) for name, weight in weights.items()]
            assert torch.equal(parameter.float() * spread(scale, *parameter.shape), torch.cat(meant)), fused
