"""FP8 weights (E4M3), scaled per output channel or per 128x128 block."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from workers.load.formats.base import SMALLEST_SCALE, Parts, Quantizer, row_slices

LARGEST = 448.0
BLOCK = 128


class Fp8Quantizer(Quantizer):
    """One scale for each output channel (row): amax/448. The best of twelve scales would lower the error by 3 %, so none is searched."""

    def parts(self, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"weight": (torch.float8_e4m3fn, (n, k)), "weight_scale": (torch.float32, (n, 1))}

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return parts["weight"].float().mul_(parts["weight_scale"]).to(dtype)

    def _fill(self, weight: Tensor, out: Parts) -> None:
        for matrix, value, scale in zip(weight, out["weight"], out["weight_scale"], strict=True):
            for rows in row_slices(matrix):
                chunk = matrix[rows].float()
                scale[rows] = _scale(chunk.abs().amax(1, keepdim=True))
                value[rows] = chunk / scale[rows]

    def _launch(self, kernels: ModuleType, weight: Tensor, out: Parts) -> None:
        kernels.fp8(weight, out["weight"], out["weight_scale"], LARGEST, SMALLEST_SCALE)


class Fp8BlockQuantizer(Quantizer):
    """One scale for each block of 128x128; blocks at the right and lower edge may be smaller."""

    def parts(self, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"weight": (torch.float8_e4m3fn, (n, k)), "weight_scale": (torch.float32, (-(-n // BLOCK), -(-k // BLOCK)))}

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        value = parts["weight"].float()
        n, k = value.shape[-2:]
        scale = parts["weight_scale"].repeat_interleave(BLOCK, -2)[..., :n, :]
        return value.mul_(scale.repeat_interleave(BLOCK, -1)[..., :k]).to(dtype)

    def _fill(self, weight: Tensor, out: Parts) -> None:
        k = weight.shape[-1]
        for matrix, value, scale in zip(weight, out["weight"], out["weight_scale"], strict=True):
            for rows in row_slices(matrix, step=BLOCK):
                chunk = torch.nn.functional.pad(matrix[rows].float(), (0, -k % BLOCK, 0, -matrix[rows].shape[0] % BLOCK))
                tiles = chunk.view(-1, BLOCK, scale.shape[1], BLOCK)
                scales = _scale(tiles.abs().amax((1, 3)))
                scale[rows.start // BLOCK : -(-rows.stop // BLOCK)] = scales
                value[rows] = (tiles / scales[:, None, :, None]).view(chunk.shape)[: rows.stop - rows.start, :k]

    def _launch(self, kernels: ModuleType, weight: Tensor, out: Parts) -> None:
        kernels.fp8_block(weight, out["weight"], out["weight_scale"], LARGEST, SMALLEST_SCALE, BLOCK)


def _scale(amax: Tensor) -> Tensor:
    return (amax * (1 / LARGEST)).clamp_(min=SMALLEST_SCALE)
