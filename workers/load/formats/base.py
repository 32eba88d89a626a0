"""The interface of every quantizer, which works on slices of a weight so that temporaries stay small."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

# Elements that torch works on at once: a float32 temporary of 512 KiB. On a GPU more, where a launch costs microseconds.
SLICE_ELEMENTS = 1 << 17
GPU_SLICE_ELEMENTS = 1 << 22
# Below this a float32 or bfloat16 scale would be a subnormal, which some kernels take for zero.
SMALLEST_SCALE = 2.0**-126
Parts = dict[str, Tensor]


class Quantizer(ABC):
    """One weight format."""

    @abstractmethod
    def parts(self, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The parts that `quantize` emits for one weight [n, k]: suffix -> (dtype, shape)."""

    def quantize(self, weight: Tensor, *, global_scale: Tensor | None = None, out: Mapping[str, Tensor] | None = None) -> Parts:
        """Quantizes [..., N, K] (bfloat16, float16 or float32; below 2**126; any strides) on the device it is on.

        global_scale: nvfp4 only, the divisor (float32; one element, or one for each matrix) where several weights share one; a power of two
            keeps every product exact.
        out: contiguous tensors to write into, with the leading dimensions and the shapes of `parts`; None allocates them.

        A GPU computes with Triton's kernels and copies nothing to the host. A CPU computes with torch, in slices of rows; of scales that
        are almost equally good it may choose another (the relative errors agree to 0.1 %, test_formats.py).
        """
        lead = weight.shape[:-2]
        parts = self.empty(weight) if out is None else dict(out)
        if weight.numel() == 0:
            return parts
        if weight.dim() > 3:
            weight = weight.flatten(0, -3)
        elif weight.dim() == 2:
            weight = weight.unsqueeze(0)
        flat = {suffix: part.view(-1, *part.shape[len(lead) :]) for suffix, part in parts.items()}
        self._fill_shared(weight, flat, global_scale)
        if weight.is_cuda:
            self._launch(triton_kernels(), weight, flat)
        else:
            self._fill(weight, flat)
        return parts

    def empty(self, weight: Tensor) -> Parts:
        """Uninitialised parts for a weight [..., N, K], on its device."""
        *lead, n, k = weight.shape
        return {
            suffix: torch.empty((*lead, *shape), dtype=dtype, device=weight.device) for suffix, (dtype, shape) in self.parts(n, k).items()
        }

    @abstractmethod
    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The weight [..., N, K] of these parts, computed in float32 and rounded once to dtype. The parts' shapes say the group size."""

    def _fill_shared(self, weight: Tensor, out: Parts, global_scale: Tensor | None) -> None:  # noqa: B027 - most formats have none
        """Fill the parts that hold for a whole matrix.

        weight: [B, N, K].
        out: B parts of each kind.
        """

    @abstractmethod
    def _fill(self, weight: Tensor, out: Parts) -> None:
        """Fill the other parts, with torch alone."""

    @abstractmethod
    def _launch(self, kernels: ModuleType, weight: Tensor, out: Parts) -> None:
        """Fill the other parts, by the kernels of `triton_kernels`."""


def amax(weight: Tensor) -> Tensor:
    """The largest magnitude, float32 [], without a copy of the weight; NaN or infinite where the weight has such a value."""
    low, high = torch.aminmax(weight)
    return torch.maximum(high, -low).float()


def amax_each(weight: Tensor) -> Tensor:
    """The largest magnitude of each matrix of [B, N, K]: float32 [B]."""
    if weight.is_cuda and weight.shape[-1] % 16 == 0:
        return triton_kernels().amax(weight)
    return torch.stack([amax(matrix) for matrix in weight])


def row_slices(matrix: Tensor, *, step: int = 1) -> list[slice]:
    """Cut a matrix into slices of whole rows, a multiple of `step`, of about SLICE_ELEMENTS."""
    rows, columns = matrix.shape
    elements = GPU_SLICE_ELEMENTS if matrix.is_cuda else SLICE_ELEMENTS
    height = max(1, elements // columns // step) * step
    return [slice(top, min(rows, top + height)) for top in range(0, rows, height)]


def triton_kernels() -> ModuleType:
    """The kernels. Triton comes with torch for a GPU, and is imported there alone."""
    from workers.load.formats import triton_kernels

    return triton_kernels
