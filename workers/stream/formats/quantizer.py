"""What every quantizer offers, and how a weight is cut so that temporaries stay small. It never knows a format's encoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from sparkd.errors import CheckpointError

# Elements worked on at once: a float32 temporary of 1 MiB. Five of them stay in the cache of a CPU and under 8 MiB together.
CHUNK_ELEMENTS = 1 << 18
Parts = dict[str, Tensor]


class Quantizer(ABC):
    """One weight format. `group_size` columns of a row share a scale; None: the format has no groups along a row."""

    group_size: int | None
    spelling: str

    @abstractmethod
    def parts(self, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """What `quantize` emits for one weight [n, k]: suffix -> (dtype, shape)."""

    def quantize(self, weight: Tensor, *, global_scale: Tensor | None = None, out: Mapping[str, Tensor] | None = None) -> Parts:
        """Quantizes [..., N, K] (bfloat16, float16 or float32; finite) on the device it is on.

        global_scale: nvfp4 only, a divisor (float32; one, or one for each matrix), where several weights share one. out: tensors to
        write into, contiguous, as `parts` says with the leading dimensions before; else they are made. No value leaves the device.
        """
        made = self.empty(weight) if out is None else dict(out)
        *lead, n, k = weight.shape
        if weight.numel() == 0:
            return made
        matrices = weight.reshape(-1, n, k) if len(lead) != 1 else weight
        flat = {suffix: part.reshape(-1, *part.shape[len(lead) :]) for suffix, part in made.items()}
        self._fill(matrices, flat, global_scale)
        return made

    def empty(self, weight: Tensor) -> Parts:
        """Uninitialised parts for a weight [..., N, K], on its device."""
        *lead, n, k = weight.shape
        return {
            suffix: torch.empty((*lead, *shape), dtype=dtype, device=weight.device) for suffix, (dtype, shape) in self.parts(n, k).items()
        }

    @abstractmethod
    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The weight [..., N, K] that the parts stand for, computed in float32 and rounded once to dtype."""

    def check(self, name: str, n: int, k: int) -> None:
        """Raises CheckpointError where a weight [n, k] cannot have this format."""
        if self.group_size is None or k % self.group_size == 0:
            return
        raise CheckpointError(
            f"K={k} is not divisible by the group size {self.group_size} of {self.spelling}", tensor=name, cure=self._cure(name, k)
        )

    def _cure(self, name: str, k: int) -> str:
        fits = [spelling for group, spelling in ((128, "int4-g128"), (64, "int4-g64"), (32, "int4-g32"), (16, "nvfp4")) if k % group == 0]
        return f"Use {' or '.join([*fits, 'fp8'])} for it"

    @abstractmethod
    def _fill(self, weight: Tensor, out: Parts, global_scale: Tensor | None) -> None:
        """Quantizes [B, N, K] into parts that have one leading dimension B."""


def nonfinite(weight: Tensor) -> Tensor:
    """Whether a weight holds a NaN or an infinity: bool tensor [] on the weight's device, from the smallest and the largest value alone."""
    low, high = torch.aminmax(weight)
    return ~(torch.isfinite(low) & torch.isfinite(high))


def windows(rows: int, columns: int, group: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Cuts a matrix into (rows, columns) of at most CHUNK_ELEMENTS each; columns are cut at multiples of the group."""
    limit = CHUNK_ELEMENTS if device.type == "cpu" else CHUNK_ELEMENTS * 64
    if columns <= limit:
        step = max(1, limit // columns)
        for start in range(0, rows, step):
            yield slice(start, min(rows, start + step)), slice(0, columns)
        return
    step = max(group, limit // group * group)
    for row in range(rows):
        for start in range(0, columns, step):
            yield slice(row, row + 1), slice(start, min(columns, start + step))
