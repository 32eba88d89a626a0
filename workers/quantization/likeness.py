"""Owns the equal properties of weights that vLLM runs as one or side by side. Never decides a format.

vLLM's classes check the same when they receive a tensor, but an export and a plan run without vLLM.
"""

from __future__ import annotations

from sparkd.checkpoint import TensorRef
from sparkd.errors import CheckpointError
from workers.quantization.fusion import siblings_of

_CURE = "Check that config.json and the shards are of one model, and download them again"
_CLASSES = frozenset({"attention", "mlp", "expert"})
_WHOLE_NUMBERS = frozenset({"I16", "U16", "I32", "U32", "I64", "U64", "BOOL"})


class Likeness:
    """Checks the weights of an unquantized or FP8 checkpoint. `see` raises CheckpointError for a weight that is unlike the earlier ones:
    one of q/k/v or gate/up with other columns, or integers in place of a weight. `done`, after the last weight, raises it for a single
    expert of a layer with another shape; a layer may have experts of two sizes (vLLM's ernie45_vl_moe.py: text and vision)."""

    def __init__(self) -> None:
        self._experts: dict[str, dict[tuple[int, ...], list[TensorRef]]] = {}
        self._columns: dict[tuple[str, str], TensorRef] = {}

    def see(self, key: str, module: str, kind: str, tensor: TensorRef) -> None:
        """Check one weight. key: the module path with expert number 0. kind: its tensor_class."""
        if kind not in _CLASSES or len(tensor.shape) != 2:
            return
        if tensor.dtype in _WHOLE_NUMBERS:
            raise _unlike(tensor, f"it holds {tensor.dtype}, and a weight of fractions is expected there")
        if kind == "expert":
            alike = self._experts.setdefault(key, {}).setdefault(tensor.shape, [])
            if len(alike) < 2:
                alike.append(tensor)
            if module != key:
                return
        parent, _, leaf = module.rpartition(".")
        siblings = siblings_of(leaf)
        if len(siblings) == 1 or "cross" in parent:  # cross-attention may take its keys and values from another model
            return
        beside = self._columns.setdefault((parent, siblings[0]), tensor)
        if beside.shape[1] != tensor.shape[1]:
            problem = f"it has {tensor.shape[1]} columns and {beside.name} has {beside.shape[1]}, though vLLM runs the two as one matrix"
            raise _unlike(tensor, problem)

    def done(self) -> None:
        for shapes in self._experts.values():
            lone = [refs[0] for refs in shapes.values() if len(refs) == 1]
            if len(shapes) < 2 or not lone:
                continue
            other = next(refs[0] for shape, refs in shapes.items() if shape != lone[-1].shape)
            raise _unlike(lone[-1], f"its shape {list(lone[-1].shape)} is not that of {other.name}, {list(other.shape)}")


def _unlike(tensor: TensorRef, reason: str) -> CheckpointError:
    return CheckpointError(reason, file=tensor.path, tensor=tensor.name, cure=_CURE)
