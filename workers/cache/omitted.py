"""Owns the weights that a model leaves out of its checkpoint, and whether its quantized cache holds that all the same. Never reads a
weight, never knows vLLM.

A model leaves out layers that predict tokens ahead (MTP) where it does not speculate, a vision tower that `limit_mm_per_prompt` or
`language_model_only` disables, and a pooling head. A cache entry without them would need a name of its own, because another start may need
them; the loader could choose that name only after it has asked the model about the whole checkpoint, and neither another start nor an
export could use the entry. So the loader makes them after the load, on the CPU and from the source, like tensors for which the disk was too
slow, and the entry holds the whole model. Not where they outweigh the tensors that the model takes: a draft in the folder of its target, or
a stage of a pipeline, would quantize a foreign model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

from workers.cache.layout import Tensors
from workers.cache.writer import layout_of
from workers.load.pipeline import SHAPE
from workers.load.virtual import Emitted, VirtualCheckpoint


def left_out(virtual: VirtualCheckpoint, taken: Container[str]) -> list[Emitted]:
    return [tensor for tensor in virtual.emitted() if tensor.name not in taken]


def can_be_completed(virtual: VirtualCheckpoint, left: Sequence[Emitted]) -> bool:
    """Whether the left-out tensors can be added to the cache: they are fewer bytes than those taken, and no unit is taken in part, because
    the load computes the unit's shared scale from the taken weights only."""
    units: dict[int, set[str]] = {}
    for tensor in left:
        units.setdefault(tensor.unit, set()).add(tensor.name)
    torn = any(tensor.unit in units and tensor.name not in units[tensor.unit] and tensor.suffix != SHAPE for tensor in virtual.emitted())
    return not torn and 2 * sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in left) < virtual.emitted_bytes


def completed(virtual: VirtualCheckpoint, taken: Tensors) -> tuple[Tensors, frozenset[str]]:
    """The layout of `layout_of`, with the taken tensors first. The left-out ones arrive later and lie apart, so that only one block of a
    file waits for both."""
    whole, plain = layout_of(virtual)
    return {**taken, **{name: what for name, what in whole.items() if name not in taken}}, plain


def recipe_without(recipe: Mapping[str, Any], left: Sequence[Emitted]) -> dict[str, Any]:
    """The canonical recipe, extended to the key of an entry without the left-out tensors."""
    names = "\0".join(sorted(tensor.name for tensor in left))
    return {**recipe, "without": hashlib.sha256(names.encode()).hexdigest()[:16]}
