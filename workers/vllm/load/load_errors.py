"""Owns the message about a tensor that vLLM's model class refuses, and about the end of a load. Never loads anything.

A class checks shapes by assertions without a message and looks names up in dictionaries; its errors name neither file nor tensor.
"""

from __future__ import annotations

import re

import torch

from sparkd.checkpoint import TensorRef
from sparkd.errors import CheckpointError
from workers.load.trace import Trace
from workers.load.virtual import DTYPES, VirtualCheckpoint

_NO_PLACE = "There is no module or parameter named"
# Messages of torch's CPU allocator (c10/core/impl/alloc_cpu.cpp), Triton's launcher, cuBLAS, and errno 12 for a mapped file.
_NO_MEMORY = re.compile(r"can't allocate memory|out of memory|STATUS_ALLOC_FAILED|Cannot allocate memory")
_CURE = "Check that config.json and the shards are of one model, and download them again"
_QUANTIZED = "; if they are, that layer has no such form in this vLLM, and its name in `keep` leaves it as it is"
_CUT = "; if the model runs without the rest, `allow_missing_weights: true` on it"
# The limit of vLLM's message, which may continue with all names that vLLM accepts.
_TEXT = 160


def mismatch(virtual: VirtualCheckpoint, name: str, model: str, error: BaseException) -> CheckpointError:
    """The error for the operator in place of `error`, which came up while the class `model` was given the emitted tensor `name`."""
    ref = source_of(virtual, name)
    message = re.split(r"(?<=\.)\s|\n", str(error), maxsplit=1)[0][:_TEXT].rstrip(".")
    reason = type(error).__name__ + (f": {message}" if message else "")
    if ref is None:
        return CheckpointError(f"vLLM's {model} does not take it ({reason})", tensor=name or None, cure=_CURE)
    shape = f"{ref.dtype} of shape {list(ref.shape)}"
    cure = _CURE + _QUANTIZED if _NO_PLACE in message and name != ref.name else _CURE
    return CheckpointError(f"vLLM's {model} does not take it as {shape} ({reason})", file=ref.path, tensor=ref.name, cure=cure)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host has no memory left; many libraries raise a RuntimeError for that."""
    is_ours = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_ours or (isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None)


def ended(error: BaseException) -> str:
    """The message for the operator about a load that ended for another reason than its checkpoint."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "The load was ended from outside."
    message = str(error).partition("\n")[0].rstrip(". ")
    if is_out_of_memory(error):
        reason = message or type(error).__name__
        return f"The memory was used up while the weights were loaded ({reason}). Free some, or choose a smaller format."
    return f"The load ended: {type(error).__name__}" + (f": {message}." if message else ".")


def refuse_integers(virtual: VirtualCheckpoint, trace: Trace) -> None:
    """Raise CheckpointError for integers of 16 bits or more that would be loaded into a floating-point matrix: torch would convert them."""
    for unit in virtual.units:
        ref = unit.plain
        if ref is None or len(ref.shape) < 2 or not _is_integer(ref) or (taken := trace.taken.get(ref.name)) is None:
            continue
        if taken.target is not None and taken.target.memory.is_floating_point():
            raise CheckpointError(
                f"it holds {ref.dtype}, and the model has {taken.target.memory.dtype} there".replace("torch.", ""),
                file=ref.path,
                tensor=ref.name,
                cure=_CURE,
            )


def refuse_longer(virtual: VirtualCheckpoint, trace: Trace, model: str) -> None:
    """Raise CheckpointError for a tensor that goes on behind the part that the model takes: vLLM's linear layers cut it without a word.

    Called on a rank that takes the ends of tensors (ranks.takes_ends).
    """
    for name, taken in trace.taken.items():
        if taken.region is None or all(stop == size for (_, stop), size in zip(taken.region, taken.shape, strict=True)):
            continue
        if (ref := source_of(virtual, name)) is not None:
            problem = f"its shape is {list(ref.shape)}, which is larger than what vLLM's {model} takes by this config.json"
            raise CheckpointError(problem, file=ref.path, tensor=ref.name, cure=_CURE + _CUT)


def source_of(virtual: VirtualCheckpoint, name: str) -> TensorRef | None:
    """The checkpoint's tensor that an emitted one is made from."""
    emitted = next((emitted for emitted in virtual.emitted() if emitted.name == name), None)
    if emitted is None:
        return None
    unit = virtual.units[emitted.unit]
    return unit.plain if emitted.weight is None else unit.weights[emitted.weight].stored.ref


def _is_integer(ref: TensorRef) -> bool:
    dtype = DTYPES.get(ref.dtype)
    return dtype is not None and not dtype.is_floating_point and dtype.itemsize > 1
