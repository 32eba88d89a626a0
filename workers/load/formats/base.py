"""Owns the interface of every quantizer, and cuts a weight so that temporaries stay small. It never knows a format's encoding."""

from __future__ import annotations

import functools
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from types import ModuleType

import torch
from torch import Tensor

from sparkd.errors import CheckpointError
from workers.quantization.formats import fitting

# Elements worked on at once: a float32 temporary of 1 MiB. Five of them stay in the cache of a CPU and under 8 MiB together.
CHUNK_ELEMENTS = 1 << 18
Parts = dict[str, Tensor]


class Quantizer(ABC):
    """One weight format. `group_size` columns of a row share a scale; None: the format has no groups along a row."""

    group_size: int | None
    spelling: str

    @abstractmethod
    def parts(self, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The parts that `quantize` emits for one weight [n, k]: suffix -> (dtype, shape)."""

    def quantize(self, weight: Tensor, *, global_scale: Tensor | None = None, out: Mapping[str, Tensor] | None = None) -> Parts:
        """Quantizes [..., N, K] (bfloat16, float16 or float32; below 2**126; any strides) on the device it is on.

        global_scale: nvfp4 only, the divisor (float32; one element, or one for each matrix) where several weights share one; a power of
        two keeps every product exact. out: contiguous tensors to write into, with the leading dimensions and the shapes of `parts`; None
        allocates them. Nothing is copied to the host; on a CPU, temporaries are under 8 MiB for any shape.
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
        kernels = triton_kernels() if weight.is_cuda else None
        if kernels is None:
            self._fill(weight, flat, global_scale)
        else:
            self._launch(kernels, weight, flat, global_scale)
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

    def check(self, name: str, n: int, k: int, file: str | None = None) -> None:
        """Raises CheckpointError where a weight [n, k], the tensor `name` of `file`, cannot have this format."""
        size = self.group_size
        if size is None or k % size == 0:
            return
        raise CheckpointError(
            f"K={k} is not divisible by the group size {size}",
            file=file,
            tensor=name,
            cure=f"Use {fitting(size, k, self.spelling.partition('-g')[0])} for it",
        )

    @abstractmethod
    def _fill(self, weight: Tensor, out: Parts, global_scale: Tensor | None) -> None:
        """Quantizes [B, N, K] with torch alone into parts that have the leading dimension B."""

    @abstractmethod
    def _launch(self, kernels: ModuleType, weight: Tensor, out: Parts, global_scale: Tensor | None) -> None:
        """Like `_fill`, by the kernels of `triton_kernels`."""


def amax(weight: Tensor) -> Tensor:
    """The largest magnitude, float32 [], without a copy of the weight; NaN or infinite where the weight has such a value."""
    low, high = torch.aminmax(weight)
    return torch.maximum(high, -low).float()


def amax_each(weight: Tensor) -> Tensor:
    """The largest magnitude of each matrix of [B, N, K]: float32 [B]."""
    kernels = triton_kernels() if weight.is_cuda and weight.shape[-1] % 16 == 0 else None
    return torch.stack([amax(matrix) for matrix in weight]) if kernels is None else kernels.amax(weight)


def chunk_elements(device: torch.device) -> int:
    """The number of elements for one operation of torch; more on a GPU, where a launch costs microseconds."""
    return CHUNK_ELEMENTS if device.type == "cpu" else CHUNK_ELEMENTS * 16


def windows(rows: int, columns: int, row_step: int, column_step: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Cuts a matrix into (rows, columns) of at most `chunk_elements`, at multiples of the steps."""
    limit = chunk_elements(device)
    width = columns if columns * row_step <= limit else max(1, limit // row_step // column_step) * column_step
    height = max(1, limit // width // row_step) * row_step
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            yield slice(top, min(rows, top + height)), slice(left, min(columns, left + width))


@functools.cache
def triton_kernels() -> ModuleType | None:
    """The CUDA kernels; None without Triton: then torch's own operations give the same result, slower."""
    if importlib.util.find_spec("triton") is None:
        return None
    from workers.load.formats import triton_kernels

    return triton_kernels
