"""Runs a checkpoint unquantized, with transformers, for a measurement of it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from sparkd.checkpoint import Checkpoint
from workers.quantization.calibration_file import BESIDE_BYTES


def running(checkpoint: Checkpoint, free_bytes: int, text: str, most_tokens: int, dtype: torch.dtype) -> tuple[Any, Tensor] | None:
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
