from __future__ import annotations

import pytest

from sparkd.checkpoint import read_checkpoint
from sparkd.errors import CheckpointError
from tests import architectures, checkpoints
from workers.stream import served
from workers.stream.recipe import Recipe


@pytest.mark.parametrize(("quantize", "on_cpu", "refused"), [("fp8-block", False, True), ("fp8-block", True, False), ("fp8", False, False)])
def test_blocks_that_a_gpus_kernels_cannot_cut_are_refused_by_name(tmp_path, monkeypatch, quantize, on_cpu, refused):
    monkeypatch.setattr(served, "_is_cpu", lambda: on_cpu)
    model = architectures.ARCHITECTURES["llama"](architectures.Size(hidden=576, heads=9, kv_heads=3, wide=1536))
    checkpoint = read_checkpoint(checkpoints.write_checkpoint(tmp_path / "m", model.config, model.entries))
    formats = Recipe.parse(quantize).assign(checkpoint)
    if not refused:
        served.refuse_unserved(checkpoint, formats, 1)
        return
    with pytest.raises(CheckpointError, match=r"K=576 is not divisible by 128, and vLLM's fp8-block kernels") as raised:
        served.refuse_unserved(checkpoint, formats, 1)
    assert raised.value.tensor is not None


@pytest.mark.parametrize(
    ("quantize", "on_cpu", "counts", "refused"),
    [("mxfp4", False, False, True), ("mxfp4", False, True, False), ("mxfp4", True, False, False), ("nvfp4", False, False, False)],
)
def test_experts_without_a_gate_are_refused_where_the_kernel_wants_one(tmp_path, monkeypatch, quantize, on_cpu, counts, refused):
    monkeypatch.setattr(served, "_is_cpu", lambda: on_cpu)
    monkeypatch.setattr(served, "_mxfp4_counts_projections", lambda: counts)
    model = architectures.ARCHITECTURES["nemotron_h"]()
    checkpoint = read_checkpoint(checkpoints.write_checkpoint(tmp_path / "m", model.config, model.entries))
    formats = Recipe.parse(quantize).assign(checkpoint)
    if not refused:
        served.refuse_unserved(checkpoint, formats, 1)
        return
    with pytest.raises(CheckpointError, match="this vLLM's mxfp4 experts need a gate projection on a GPU") as raised:
        served.refuse_unserved(checkpoint, formats, 1)
    assert raised.value.tensor is not None and raised.value.tensor.endswith(".up_proj.weight")
