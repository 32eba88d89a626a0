"""FP8 weights (E4M3), scaled per output channel or per 128x128 block. It never quantizes activations."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workers.stream.formats.quantizer import Parts, Quantizer, windows

LARGEST = 448.0
BLOCK = 128
_SMALLEST = 2.0**-100


class Fp8Quantizer(Quantizer):
    """One scale for each output channel (row)."""

    group_size = None
    spelling = "fp8"

    def parts(self, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"weight": (torch.float8_e4m3fn, (n, k)), "weight_scale": (torch.float32, (n, 1))}

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return parts["weight"].float().mul_(parts["weight_scale"]).to(dtype)

    def _fill(self, weight: Tensor, out: Parts, global_scale: Tensor | None) -> None:
        low, high = torch.aminmax(weight, dim=-1, keepdim=True)
        scale = out["weight_scale"].copy_(torch.maximum(high, -low)).div_(LARGEST).clamp_(min=_SMALLEST)
        for index in range(weight.shape[0]):
            for rows, columns in windows(weight.shape[1], weight.shape[2], 1, weight.device):
                out["weight"][index, rows, columns] = _encode(weight[index, rows, columns].float().div_(scale[index, rows]))


class Fp8BlockQuantizer(Quantizer):
    """One scale for each block of 128x128; blocks at the right and lower edge may be smaller."""

    group_size = None
    spelling = "fp8-block"

    def parts(self, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"weight": (torch.float8_e4m3fn, (n, k)), "weight_scale": (torch.float32, (-(-n // BLOCK), -(-k // BLOCK)))}

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        value = parts["weight"].float()
        n, k = value.shape[-2:]
        scale = parts["weight_scale"].repeat_interleave(BLOCK, -2)[..., :n, :].repeat_interleave(BLOCK, -1)[..., :k]
        return value.mul_(scale).to(dtype)

    def _fill(self, weight: Tensor, out: Parts, global_scale: Tensor | None) -> None:
        n = weight.shape[1]
        for index in range(weight.shape[0]):
            for row in range(0, n, BLOCK):
                rows = slice(row, min(n, row + BLOCK))
                self._fill_band(weight[index, rows], out["weight"][index, rows], out["weight_scale"][index, row // BLOCK])

    def _fill_band(self, weight: Tensor, out: Tensor, scale: Tensor) -> None:
        for column in range(0, weight.shape[1], BLOCK):
            columns = slice(column, column + BLOCK)
            value = weight[:, columns].float()
            mine = scale[column // BLOCK].copy_(value.abs().amax()).div_(LARGEST).clamp_(min=_SMALLEST)
            out[:, columns] = _encode(value.div_(mine))


def _encode(value: Tensor) -> Tensor:
    return value.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
