"""The random checkpoints that other tests and the benches load: they are what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from sparkd.checkpoint import read_checkpoint
from tests.support.checkpoints import SOURCES, qwen3_moe

SMALL = {"layers": 2, "hidden": 128, "experts": 4, "intermediate": 64, "heads": 2, "kv_heads": 1, "shard_bytes": 128 * 1024}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """As the safetensors library reads them, file by file through the index."""
    found: dict[str, torch.Tensor] = {}
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for file in sorted(set(weight_map.values())):
        with safe_open(folder / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                assert weight_map[name] == file
                found[name] = opened.get_tensor(name)
    assert found.keys() == weight_map.keys()
    return found


@pytest.mark.parametrize("source", SOURCES)
def test_safetensors_reads_every_source(tmp_path: Path, source: str) -> None:
    qwen3_moe(tmp_path, source=source, **SMALL)

    found = tensors(tmp_path)

    expert = "model.layers.1.mlp.experts.3.down_proj.weight"
    assert found[expert].shape == (128, 64)
    assert found["model.layers.0.mlp.gate.weight"].dtype == (torch.float16 if source == "f16" else torch.bfloat16)
    value = found[expert].float()
    if source.startswith("fp8"):
        name = "weight_scale_inv" if source == "fp8_block" else "weight_scale"
        value = value * found[expert.replace("weight", name)].float().mean()
    assert float(value.std()) == pytest.approx(0.03, rel=0.3)
    assert all(bool(torch.isfinite(tensor.float()).all()) for tensor in found.values())
    read = read_checkpoint(tmp_path)
    assert (read.quantization.method if read.quantization else None) == (source if source.startswith("fp8") else None)
    assert read.tensors.keys() == found.keys()
