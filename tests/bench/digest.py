"""What a loaded model holds, as one digest for each parameter and buffer, and the first in which two loads differ. Never loads a model.

Digests are of the tensor's bytes as the kernels find them, after process_weights_after_loading: name, dtype, shape and SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

CHUNK_BYTES = 16 * 2**20  # of a tensor on the host at once
# What nothing reads, so nothing fills it: its bytes are whatever the memory held (compressed-tensors' note of a weight's shape).
_UNREAD = ("weight_shape",)

Digests = Mapping[str, str]


def digests(model: Any) -> dict[str, str]:
    """Name -> `dtype [shape] sha256` of every parameter and buffer; one that another name shares is there under both."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: digest(tensor) for name, tensor in named if not name.endswith(_UNREAD) and not tensor.is_meta}


def digest(tensor: Any) -> str:
    """Of a tensor on any device, chunk by chunk."""
    found = hashlib.sha256()
    for part in _parts(tensor.detach()):
        found.update(memoryview(part))
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {found.hexdigest()}"


def difference(one: Digests, other: Digests) -> str | None:
    """The first name, in the first's order, that is not the same in both, and what is different about it; None where they are equal."""
    for name in (*one, *(name for name in other if name not in one)):
        before, after = one.get(name), other.get(name)
        if before == after:
            continue
        if before is None or after is None:
            return f"{name} is {'new' if before is None else 'missing'}"
        kinds = [said.rpartition(" ")[0] for said in (before, after)]
        return f"{name} has other values" if kinds[0] == kinds[1] else f"{name} is {kinds[1]} instead of {kinds[0]}"
    return None


def _parts(tensor: Any) -> Iterator[Any]:
    """numpy uint8, in the order of the elements. One that is not contiguous is made so row by row, or by as many as fit."""
    import torch

    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        flat = tensor.view(-1).view(torch.uint8)
        for start in range(0, flat.numel(), CHUNK_BYTES):
            yield flat[start : start + CHUNK_BYTES].cpu().numpy()
        return
    row_bytes = max(1, tensor[:1].numel() * tensor.element_size())
    rows = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, tensor.shape[0], rows):
        yield tensor[start : start + rows].contiguous().view(-1).view(torch.uint8).cpu().numpy()
