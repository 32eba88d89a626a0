"""Checkpoints that were quantized elsewhere pass through: vLLM's own loader and ours fill its real classes alike, bit for bit.

vLLM's CPU build has a kernel's layout for dense AWQ and GPTQ; for NVFP4 and for experts it has none, so those are filled only.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.architectures import ARCHITECTURES, SOURCES
from tests.support.checkpoints import MIB, write_checkpoint
from tests.workers.load.loading import load
from workers import plugin

UNTOUCHED = 0xA5
# The KV cache's own, and biases of experts that have none: no such checkpoint has them.
_NOT_STORED = re.compile(r"\.attn\._?([qkv]_(scale|zero_point)|prob_scale)$|\.w(13|2)_bias$")


class Filled:
    """In the place of a kernel for NVFP4, which vLLM's CPU build lacks: it is never asked to compute."""

    def __init__(self, config: Any) -> None: ...

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None

    def input_quant_key(self) -> None: ...

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None: ...


@pytest.fixture(autouse=True)
def registered(one_rank: None) -> None:
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.platforms import PlatformEnum

    plugin.register()
    register_linear_kernel(Filled, PlatformEnum.CPU, "nvfp4")


@pytest.fixture
def with_experts(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters as for a GPU's kernels, which are never asked to compute."""
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend

    quantization = "vllm.model_executor.layers.quantization"
    nvfp4 = ("modelopt", "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4")
    for module in ("auto_awq", "auto_gptq"):
        monkeypatch.setattr(f"{quantization}.{module}.select_wna16_moe_backend", lambda *_args, **_more: (WNA16MoEBackend.MARLIN, object))
    for module in nvfp4:
        monkeypatch.setattr(f"{quantization}.{module}.select_nvfp4_moe_backend", lambda *_args, **_more: (NvFp4MoeBackend.MARLIN, object))


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
def test_experts_arrive_as_they_do_without_us(tmp_path: Path, source: str, with_experts: None) -> None:
    assert different(written(tmp_path / "model", f"qwen3_moe-{source}"), process=False) == ([], [])


@pytest.mark.rest
@pytest.mark.parametrize("source", SOURCES)
def test_a_dense_model_arrives_as_it_does_without_us(tmp_path: Path, source: str) -> None:
    assert different(written(tmp_path / "model", f"llama-{source}"), process=False) == ([], [])


# On a CPU sparkd's own scheme computes with ct_nvfp4, for which vLLM has no kernel there, and keeps another layout.
@pytest.mark.parametrize("source", [source for source in SOURCES if source != "ct_nvfp4"])
def test_a_dense_model_has_the_kernels_layout_that_it_has_without_us(tmp_path: Path, source: str) -> None:
    assert different(written(tmp_path / "model", f"llama-{source}"), process=True) == ([], [])
