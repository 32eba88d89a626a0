"""Triton and the quantizers' kernels, made ready before the first weight is there. Never quantizes a weight.

The first kernel of a process makes Triton hash all of its own files, 400 MB, and where they are out of the page cache that is half a second
in which the ring is full and the disk stands still. Hashing needs neither the device nor Python's lock, so it begins as soon as a
configuration says that something will be quantized, seconds before the load.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Collection, Mapping, MutableMapping

import torch

from workers.quantization.formats import Format
from workers.stream.formats import amax_each, global_scale, quantizer

# Tells the processes that vLLM starts, which see no configuration before their load.
VARIABLE = "SPARKD_STREAM_QUANTIZES"


def make_ready(environ: MutableMapping[str, str]) -> None:
    """Here, for a load in this process or in one that is forked from it, and in what inherits `environ`."""
    environ[VARIABLE] = "1"
    _hash()


def make_ready_if_told(environ: Mapping[str, str]) -> None:
    """In a process that was started by one that called `make_ready`."""
    if environ.get(VARIABLE) == "1" and multiprocessing.parent_process() is not None:
        _hash()


def compile_kernels(forms: Collection[Format], device: torch.device) -> None:
    """Runs each format's quantizer once, in a thread of its own. A failure shows again at the first unit."""

    def run() -> None:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)), contextlib.suppress(RuntimeError):
            weight = torch.zeros(2, 128, 2048, dtype=torch.bfloat16, device=device)
            largest = amax_each(weight)
            for form in forms:
                shared = {"global_scale": global_scale(largest)} if form.name == "nvfp4" else {}
                quantizer(form).quantize(weight, **shared)

    threading.Thread(target=run, name="stream-compile", daemon=True).start()


def _hash() -> None:
    """Triton keeps the result (`triton_key` of triton/runtime/cache.py is an lru_cache); a release that has it elsewhere hashes later."""
    try:
        from triton.runtime.cache import triton_key
    except ImportError:
        return
    threading.Thread(target=triton_key, name="stream-compile", daemon=True).start()
