"""FP8 weights (E4M3), scaled per output channel or per 128x128 block. It never quantizes activations."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from workers.load.formats.base import Parts, Quantizer, windows

LARGEST = 448.0
BLOCK = 128
# The scale of weights so small that their own scale would be a float32 subnormal, or none at all.
SMALLEST_SCALE = 2.0**-126


class Fp8Quantizer(Quantizer):
    """One scale for each output channel (row): amax/448. The best of twelve scales would lower the error by 3 %, so none is searched."""

    group_size = None
    spelling = "fp8"

    def parts(self, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"weight": (torch.float8_e4m3fn, (n, k)), "weight_scale": (torch.float32, (n, 1))}

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return parts["weight"].float().mul_(parts["weight_scale"]).to(dtype)

    def _fill(self, weight: Tensor, out: Parts, global_scale: Tensor | None) -> None:
        for matrix, value, scale in zip(weight, out["weight"], out["weight_scale"], strict=True):
            low, high = torch.aminmax(matrix, dim=-1, keepdim=True)
            _scale(torch.maximum(high, -low), out=scale)
            for rows, columns in windows(matrix.shape[0], matrix.shape[1], 1, 1, matrix.device):
                value[rows, columns] = matrix[rows, columns].to(torch.float32, copy=True).div_(scale[rows])

    def _launch(self, kernels: ModuleType, weight: Tensor, out: Parts, global_scale: Tensor | None) -> None:
        kernels.fp8(weight, out["weight"], out["weight_scale"], LARGEST, SMALLEST_SCALE)


class Fp8BlockQuantizer(Quantizer):
    """One scale for each block of 128x128; blocks at the right and lower edge may be smaller."""

    group_size = None
    spelling = "fp8-block"

    def parts(self, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"weight": (torch.float8_e4m3fn, (n, k)), "weight_scale": (torch.float32, (-(-n // BLOCK), -(-k // BLOCK)))}

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        value = parts["weight"].float()
        n, k = value.shape[-2:]
        scale = parts["weight_scale"].repeat_interleave(BLOCK, -2)[..., :n, :]
        return value.mul_(scale.repeat_interleave(BLOCK, -1)[..., :k]).to(dtype)

    def _fill(self, weight: Tensor, out: Parts, global_scale: Tensor | None) -> None:
        for matrix, value, scale in zip(weight, out["weight"], out["weight_scale"], strict=True):
            for rows, columns in windows(matrix.shape[0], matrix.shape[1], BLOCK, BLOCK, matrix.device):
                part = matrix[rows, columns]
                height, width = part.shape
                blocks = torch.nn.functional.pad(part.to(torch.float32, copy=True), (0, -width % BLOCK, 0, -height % BLOCK))
                tiles = blocks.view(blocks.shape[0] // BLOCK, BLOCK, -1, BLOCK)
                mine = scale[rows.start // BLOCK : -(-rows.stop // BLOCK), columns.start // BLOCK : -(-columns.stop // BLOCK)]
                mine.copy_(_scale(tiles.abs().amax(3).amax(1)))
                tiles.div_(mine[:, None, :, None])
                value[rows, columns] = blocks[:height, :width]

    def _launch(self, kernels: ModuleType, weight: Tensor, out: Parts, global_scale: Tensor | None) -> None:
        kernels.fp8_block(weight, out["weight"], out["weight_scale"], LARGEST, SMALLEST_SCALE, BLOCK)


def _scale(amax: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.mul(amax.float(), 1 / LARGEST, out=out).clamp_(min=SMALLEST_SCALE)
