"""Measures how large the inputs of a model's layers become over a text, for formats whose activations have four bits.

The program is a child of a loading rank: it reads {"folder": PATH, "free_bytes": NUMBER, "text": TEXT, "parent": PID} from stdin and
writes one JSON line, {"largest": {PARAMETER: MAGNITUDE}}. A parameter has transformers' own name, without `.weight`; experts that
transformers packs are one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparkd.checkpoint import Checkpoint, read_checkpoint
from workers.host import processes

# The scale of an input is a power of two with room above: a longer text would not change it.
MOST_TOKENS = 512
# Beside the model: the layers' outputs, the probabilities of all tokens, and one layer more.
BESIDE_BYTES = 4 << 30


def largest_inputs(folder: str, free_bytes: int, text: str) -> dict[str, float]:
    """The largest magnitude of what is multiplied with each parameter; empty where the model cannot be run."""
    dtype = torch.bfloat16 if _has_bf16() else torch.float32
    model_and_tokens = _running(read_checkpoint(folder), free_bytes, text, MOST_TOKENS, dtype)
    if model_and_tokens is None:
        return {}
    model, tokens = model_and_tokens
    names = {
        parameter.untyped_storage().data_ptr(): name.removesuffix(".weight")
        for name, parameter in model.named_parameters()
        if parameter.dim() in (2, 3)
    }
    largest: dict[str, float] = {}

    def note(name: str, operand: torch.Tensor) -> torch.Tensor:
        if operand.numel():
            largest[name] = max(largest.get(name, 0.0), float(operand.abs().max()))
        return operand

    # Inference tensors would reach no dispatch mode as single products.
    with torch.no_grad(), Operands(names, note):
        model(tokens, use_cache=False)
    return largest


class Operands(TorchDispatchMode):
    """A context in which every operation that multiplies with a parameter gets, as the operand before it, what `change` makes of that
    operand and the parameter's name. names: by the address of the parameter's storage."""

    def __init__(self, names: Mapping[int, str], change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._names = names
        self._change = change

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = list(args)
        for at, (operand, weight) in enumerate(pairwise(args)):
            name = self._name(weight)
            is_operand = isinstance(operand, torch.Tensor) and operand.is_floating_point() and operand.dim() > 1
            if name is not None and is_operand and self._name(operand) is None:
                given[at] = self._change(name, operand)
        return function(*given, **(kwargs or {}))

    def _name(self, tensor: Any) -> str | None:
        is_matrix = isinstance(tensor, torch.Tensor) and tensor.dim() in (2, 3)
        return self._names.get(tensor.untyped_storage().data_ptr()) if is_matrix else None


def _running(checkpoint: Checkpoint, free_bytes: int, text: str, most_tokens: int, dtype: torch.dtype) -> tuple[Any, torch.Tensor] | None:
    """The model and the first tokens of a text (int64 [1, most_tokens at most]), on the CPU; None, with the reason on stderr, where it
    takes more memory than free_bytes, the checkpoint is quantized, or transformers cannot run it."""
    needed = checkpoint.total_bytes * dtype.itemsize // 2 + BESIDE_BYTES
    if checkpoint.quantization is not None or needed > free_bytes:
        memory = f"it takes {needed / 2**30:.1f} GiB to run it unquantized, and {free_bytes / 2**30:.1f} GiB are free"
        sys.stderr.write(f"{memory if needed > free_bytes else 'the checkpoint is quantized'}\n")
        return None
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        tokens = AutoTokenizer.from_pretrained(checkpoint.folder)(text, return_tensors="pt").input_ids
        model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=dtype)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        sys.stderr.write(f"transformers cannot run it: {type(error).__name__}: {error}\n")
        return None
    return model.eval(), tokens[:, :most_tokens]


def _has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16: elsewhere torch does it value by value (28 ms against 3.3 ms for 256x576x1536 on AVX2)."""
    has = torch.cpu.get_capabilities()
    return any(has.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def main() -> int:
    # A rank that ends takes it along.
    processes.prctl(processes.PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    request = json.load(sys.stdin)
    if os.getppid() != request["parent"]:
        return 1  # the rank ended before the line above
    with contextlib.redirect_stdout(sys.stderr):
        largest = largest_inputs(request["folder"], request["free_bytes"], request["text"])
    sys.stdout.write(f"{json.dumps({'largest': largest})}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
