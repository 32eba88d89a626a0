"""Runs a checkpoint unquantized, with transformers, and compares answers: what other programs measure a model by. Never keeps a result."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from sparkd.checkpoint import Checkpoint
from workers.quantization.calibration_file import BESIDE_BYTES

_CHUNK_TOKENS = 128


def running(
    checkpoint: Checkpoint, free_bytes: int, text: str, most_tokens: int, dtype: torch.dtype, *, cuda: bool = False
) -> tuple[Any, Tensor] | None:
    """The model and the first tokens of a text (int64 [1, most_tokens at most]), on the GPU or the CPU; None, with the reason on stderr,
    where it takes more memory than free_bytes, the checkpoint is quantized, or transformers cannot run it. On its way to a GPU the model is
    in memory twice."""
    room = min(free_bytes, torch.cuda.mem_get_info()[0]) if cuda else free_bytes
    needed = checkpoint.total_bytes * dtype.itemsize // 2 * (2 if cuda else 1) + BESIDE_BYTES
    if checkpoint.quantization is not None or needed > room:
        memory = f"it takes {needed / 2**30:.1f} GiB to run it unquantized, and {room / 2**30:.1f} GiB are free"
        sys.stderr.write(f"{memory if needed > room else 'the checkpoint is quantized'}\n")
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
    device = "cuda" if cuda else "cpu"
    return model.eval().to(device), tokens[:, :most_tokens].to(device)


def divergence(reference: Tensor, other: Tensor) -> float:
    """KL, nats, mean over the tokens, of log-probabilities [tokens, vocabulary]. A part of the tokens at a time: a vocabulary is large."""
    chunks = zip(reference.split(_CHUNK_TOKENS), other.split(_CHUNK_TOKENS), strict=True)
    total = sum(float((old.exp() * (old - new)).sum()) for old, new in chunks)
    return max(total / len(reference), 0.0)
