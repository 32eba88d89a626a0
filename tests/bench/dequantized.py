"""A BF16 checkpoint of the values that a recipe's formats hold, to compare an engine on quantized kernels with. Never streams.

Tensors are read whole and quantized one by one with workers.stream.formats; nothing of the loader's pass over a checkpoint is used, so a
mistake in it shows. For small models only.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sparkd.checkpoint import Checkpoint, TensorRef, read_checkpoint
from tests.support.checkpoints import DRAWN
from workers.quantization.fusion import FUSED
from workers.quantization.packed_scale import packed_module_of
from workers.quantization.recipe import Format, QuantizationRecipe
from workers.stream.formats import global_scale, quantizer

_GRANITE = (".input_linear", ".output_linear")
_SIBLINGS = {name: group for group in FUSED for name in group}


def write_dequantized(source: Path, into: Path, quantize: str | Mapping[str, Any]) -> int:
    """How many weights were quantized; with 0 nothing is written, the source is its own reference."""
    checkpoint = read_checkpoint(source)
    formats = {module: form for module, form in QuantizationRecipe.parse(quantize).assign(checkpoint).items() if form.name != "bf16"}
    if not formats:
        return 0
    into.mkdir(parents=True)
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    (into / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (source / name).exists():
            shutil.copy(source / name, into / name)
    weights = dict(_weights(checkpoint, formats))
    save_file(_dequantized(weights, formats), into / "model.safetensors", {"format": "pt"})
    return len(formats)


def _weights(checkpoint: Checkpoint, formats: Mapping[str, Format]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in 16 bits or as it is: FP8 weights multiplied by their scales, packed experts that are quantized one by one."""
    for name, ref in checkpoint.tensors.items():
        module = name.removesuffix(".weight")
        if name.endswith(("weight_scale", "weight_scale_inv")) or packed_module_of(name):
            continue
        tensor = read(ref)
        if ref.dtype == "F8_E4M3":
            tensor = _unscaled(tensor, checkpoint, module)
        packed = len(ref.shape) == 3 and module.endswith((".gate_up_proj", ".down_proj", *_GRANITE)) and formats.get(module)
        if not packed or f"{module}_bias" in checkpoint.tensors:  # gpt-oss's are taken as they stand, see _dequantized
            yield name, tensor
            continue
        experts, _, which = module.rpartition(".")
        if module.endswith(_GRANITE):  # its class takes them one by one too, under the others' names
            experts = f"{experts}.experts"
        for expert, block in enumerate(tensor):
            if which in ("down_proj", "output_linear"):
                yield f"{experts}.{expert}.down_proj.weight", block.clone()
                continue
            for half, projection in zip(block.chunk(2), ("gate_proj", "up_proj"), strict=True):
                yield f"{experts}.{expert}.{projection}.weight", half.clone()


def read(ref: TensorRef) -> torch.Tensor:
    with open(ref.path, "rb") as file:
        raw = bytearray(os.pread(file.fileno(), ref.nbytes, ref.offset))
    return torch.frombuffer(raw, dtype=getattr(torch, DRAWN[ref.dtype])).view(ref.shape)


def _unscaled(weight: torch.Tensor, checkpoint: Checkpoint, module: str) -> torch.Tensor:
    names = (".weight_scale_inv", ".weight_scale", "_scale_inv", "_scale")
    scale = read(next(ref for name in names if (ref := checkpoint.tensors.get(f"{module}{name}")))).float()
    if scale.ndim >= 2 and scale.shape[-1] != 1:  # DeepSeek's blocks of 128x128
        scale = scale.repeat_interleave(128, -2)[..., : weight.shape[-2], :].repeat_interleave(128, -1)[..., : weight.shape[-1]]
    return (weight.float() * scale).bfloat16()


def _dequantized(weights: Mapping[str, torch.Tensor], formats: Mapping[str, Format]) -> dict[str, torch.Tensor]:
    made = dict(weights)
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        form = formats.get(module) or _of_packed(module, formats)
        if form is None:
            continue
        shared = None
        if form.name == "nvfp4":
            parent, _, last = module.rpartition(".")
            together = [weights[f"{parent}.{one}.weight"] for one in _SIBLINGS.get(last, (last,)) if f"{parent}.{one}.weight" in weights]
            shared = global_scale(torch.stack([one.abs().amax().float() for one in together]).amax())
        used = quantizer(form)
        if weight.ndim == 3:  # gpt-oss: [experts, K, N]
            parts = [used.quantize(block.t().contiguous()) for block in weight]
            made[name] = torch.stack([used.dequantize(one, torch.bfloat16).t() for one in parts]).contiguous()
            continue
        made[name] = used.dequantize(used.quantize(weight, global_scale=shared), torch.bfloat16)
    return made


def _of_packed(module: str, formats: Mapping[str, Format]) -> Format | None:
    """The format of one expert's projection where the checkpoint has the experts packed."""
    before, found, after = module.partition(".experts.")
    packed, granites = ("down_proj", _GRANITE[1]) if after.endswith("down_proj") else ("gate_up_proj", _GRANITE[0])
    return formats.get(f"{before}.experts.{packed}") or formats.get(f"{before}{granites}") if found else None
