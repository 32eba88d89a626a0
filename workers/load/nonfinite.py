"""Finds tensors of a load with a NaN or an infinity, by flags that stay on the device until many are read at once.

A flag is the least or largest value of a tensor, in which a NaN or an infinity shows: one reduction for each tensor, no further memory and
no wait. Several tensors may share a flag; the loader reads their files to find the bad one only once the flag shows a fault.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Container, Sequence

import torch

from sparkd.checkpoint import TensorRef
from sparkd.errors import CheckpointError
from workers.load.virtual import dtype_of

CHECKED = 512  # the number of flags that are read at once, because each read waits for the device
READ_BYTES = 32 * 2**20
# The smallest code that is no finite number: E4M3's NaN, E5M2's infinity (OCP 8-bit floating point 1.0); E8M0's NaN (OCP MX 1.0).
_CODES = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}
_NAN_OF_E8M0 = 0xFF
# Single numbers that may be infinite: bounds that a model leaves open (Gemma 4's clipped layers have input_max and output_min), and scales
# of activations of an expert that calibration never reached (14 of 92,400 in a published Qwen3.5-397B-A17B NVFP4; vllm-project/
# compressed-tensors pull request 595), which no kernel for 16-bit activations reads.
_MAY_BE_INFINITE = ("_min", "_max", ".input_scale", ".input_global_scale")
# The tensors that are weights by the last part of their name: packed experts, their biases and every scale of a weight included. Anything
# else may be a buffer that its model fills itself, such as a causal mask of -inf, which older checkpoints hold and no model of vLLM's
# takes.
_WEIGHT = re.compile(r"(?:^|\.)(?:weight(?:_\w+)?|bias|scales?|\w+_proj(?:_\w+)?)$")


class NonFiniteCheck:
    """The flags of one load on one device.

    weights_only: it is unknown which tensors the model takes, so `look` sees only a NaN in tensors other than weights.
    left_out: names of tensors that the model does not take; `damaged` has the bad ones, which are not refused.
    """

    def __init__(self, device: torch.device, *, weights_only: bool = False, left_out: Container[str] = ()) -> None:
        self.damaged: list[TensorRef] = []
        self._device = device
        self._weights_only = weights_only
        self._left_out = left_out
        self._seen: list[tuple[Sequence[tuple[TensorRef, ...]], torch.Tensor]] = []
        self._count = 0

    def note(self, groups: Sequence[tuple[TensorRef, ...]], values: torch.Tensor) -> None:
        """Keep flags. values [groups]: not finite where a tensor of that group has a NaN or an infinity."""
        self._seen.append((groups, values.to(self._device)))
        self._count += len(groups)

    def look(self, refs: Sequence[TensorRef], tensor: torch.Tensor) -> None:
        """Make and keep the flags of one tensor of any shape, which has the elements of `refs`; none for integers."""
        if tensor.numel() == 0 or (tensor.numel() == len(refs) and all(ref.name.endswith(_MAY_BE_INFINITE) for ref in refs)):
            return
        unknown = self._weights_only or all(ref.name in self._left_out for ref in refs)
        may_mask = unknown and not any(_WEIGHT.search(ref.name) for ref in refs)
        group = (tuple(refs),)
        for value in _flags(tensor, may_mask=may_mask):
            self.note(group, value.reshape(1))

    def look_now_and_then(self) -> None:
        """Call `refuse` once there are CHECKED flags."""
        if self._count >= CHECKED:
            self.refuse()

    def refuse(self) -> None:
        """Raise CheckpointError for the first bad tensor so far, with the number of the others. Waits for the device."""
        seen, self._seen, self._count = self._seen, [], 0
        if not seen:
            return
        bad = torch.cat([values for _, values in seen]).isfinite().logical_not().nonzero().flatten().tolist()
        if not bad:
            return
        groups = [group for groups, _ in seen for group in groups]
        suspects = dict.fromkeys(ref for at in bad for ref in _blamed(groups[at]))
        self.damaged += [ref for ref in suspects if ref.name in self._left_out]
        blamed = [ref for ref in suspects if ref.name not in self._left_out]
        if not blamed:
            return
        ref = blamed[0]
        others = ("", ", as does another tensor")[len(blamed) - 1] if len(blamed) < 3 else f", as do {len(blamed) - 1} more tensors"
        raise CheckpointError(f"it holds NaN or Inf{others}", file=ref.path, tensor=ref.name, cure="The file is damaged: fetch it again")


def _flags(tensor: torch.Tensor, *, may_mask: bool = False) -> Sequence[torch.Tensor]:
    """Values that are all finite if every element is; with may_mask, if none is NaN."""
    if tensor.dtype is torch.float8_e8m0fnu:
        return (_flag(tensor.view(torch.uint8), _NAN_OF_E8M0),)
    if (code := _CODES.get(tensor.dtype)) is not None:
        # Signed, positive magnitudes are the largest; unsigned, negative ones are.
        return _flag(tensor.view(torch.int8), code), _flag(tensor.view(torch.uint8), code | 0x80)
    if not tensor.is_floating_point():
        return ()
    extremes = torch.aminmax(tensor)
    return tuple(torch.where(value.isinf(), 0.0, value) for value in extremes) if may_mask else tuple(extremes)


def _flag(codes: torch.Tensor, least: int) -> torch.Tensor:
    return torch.where(codes.amax() >= least, torch.inf, 0.0)


def _blamed(group: Sequence[TensorRef]) -> Sequence[TensorRef]:
    """The tensors that are bad in their file; the first one, where only the tensor made from them is bad."""
    if len(group) == 1:
        return group
    return [ref for ref in group if _is_bad(ref)] or group[:1]


def _is_bad(ref: TensorRef) -> bool:
    with contextlib.suppress(OSError), open(ref.path, "rb") as file:
        file.seek(ref.offset)
        left = ref.nbytes
        while left and (data := file.read(min(left, READ_BYTES))):
            left -= len(data)
            flags = _flags(torch.frombuffer(bytearray(data), dtype=dtype_of(ref)))
            if any(not flag.isfinite() for flag in flags):
                return True
    return False
