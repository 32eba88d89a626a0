"""Checkpoints that were quantized elsewhere pass through: vLLM's own loader and ours fill its real classes alike, bit for bit.

vLLM's CPU build has a kernel's layout for dense AWQ and GPTQ, and ours for dense NVFP4; for experts neither has, so those are filled only.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.architecture_sources import SOURCES
from tests.support.architectures import ARCHITECTURES
from tests.support.checkpoints import MIB, write_checkpoint
from tests.workers.stream.loading import load
from workers import plugin
from workers.stream.vllm import loader
from workers.stream.vllm.cpu_linear import register_cpu_linear_kernels

with warnings.catch_warnings():
    # vLLM's own warnings are not ours.
    warnings.simplefilter("ignore")
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
    from vllm.model_executor.layers.quantization import auto_awq, auto_gptq, modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4 as ct_nvfp4,
    )

UNTOUCHED = 0xA5
# The KV cache's own, and biases of experts that have none: no such checkpoint has them.
_NOT_STORED = re.compile(r"\.attn\._?([qkv]_(scale|zero_point)|prob_scale)$|\.w(13|2)_bias$")


@pytest.fixture(autouse=True)
def registered(one_rank: None) -> None:
    plugin.register()
    register_cpu_linear_kernels()


@pytest.fixture
def with_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters as for a GPU's kernels, which are never asked to compute."""
    for module in (auto_awq, auto_gptq):
        monkeypatch.setattr(module, "select_wna16_moe_backend", lambda *_args, **_more: (WNA16MoEBackend.MARLIN, object))
    for module in (modelopt, ct_nvfp4):
        monkeypatch.setattr(module, "select_nvfp4_moe_backend", lambda *_args, **_more: (NvFp4MoeBackend.MARLIN, object))


def spoil(model: Any) -> None:
    for tensor in model.state_dict().values():
        tensor.view(-1).view(torch.uint8).fill_(UNTOUCHED)


def octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def written(folder: Path, name: str) -> Path:
    model = ARCHITECTURES[name]()
    return write_checkpoint(folder, model.config, model.entries, shard_bytes=MIB, shuffled=True)


def different(folder: Path, *, process: bool) -> tuple[list[str], list[str]]:
    """(what is not the same, or only in one; what neither has written to) of a model loaded by us and by vLLM."""
    settings = {"quantize": "nvfp4", "cache_dir": str(folder.parent / "cache")}
    ours = load(folder, settings, spoil, process=process).state_dict()
    stock = load(folder, {}, spoil, load_format="safetensors", process=process).state_dict()
    assert not (folder.parent / "cache").exists()
    assert len(stock) > 10
    odd = [name for name, tensor in stock.items() if name not in ours or not torch.equal(octets(ours[name]), octets(tensor))]
    kept = {name: tensor for name, tensor in stock.items() if tensor.numel() and not _NOT_STORED.search(name)}
    unwritten = [name for name, tensor in kept.items() if bool((octets(tensor) == UNTOUCHED).all())]
    return [*odd, *(ours.keys() - stock.keys())], unwritten


@pytest.mark.parametrize("source", SOURCES)
def test_experts_arrive_as_they_do_without_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, with_experts: None) -> None:
    monkeypatch.setattr(loader, "is_ours", lambda _method: False)  # nothing is put into a kernel's layout before it is looked at
    assert different(written(tmp_path / "model", f"qwen3_moe-{source}"), process=False) == ([], [])


# On a CPU sparkd's own scheme computes with ct_nvfp4, for which vLLM has no kernel there, and keeps another layout.
@pytest.mark.parametrize(
    ("source", "process"),
    [(source, process) for source in SOURCES for process in (False, True) if (source, process) != ("ct_nvfp4", True)],
)
def test_a_dense_model_arrives_as_it_does_without_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, process: bool) -> None:
    if not process:
        monkeypatch.setattr(loader, "is_ours", lambda _method: False)
    assert different(written(tmp_path / "model", f"llama-{source}"), process=process) == ([], [])
