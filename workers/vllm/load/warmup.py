"""Prepares Triton and the quantizers' kernels before the first weight arrives.

The first kernel of a process makes Triton hash all of its own files, 400 MB. If they are not in the page cache, that takes half a second in
which the ring is full and the disk idle. Hashing needs neither the device nor Python's lock, so it begins as soon as a configuration has a
format to quantize to, seconds before the load.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Collection, Mapping, MutableMapping

import torch

from workers.load.formats import amax_each, global_scale, quantizer
from workers.quantization.formats import Format

# The variable for processes that vLLM starts, which see no configuration before their load.
VARIABLE = "SPARKD_STREAM_QUANTIZES"


def make_ready(environ: MutableMapping[str, str]) -> None:
    """Prepare this process and its forks, and by the variable every process that inherits `environ`."""
    environ[VARIABLE] = "1"
    _hash()


def make_ready_if_told(environ: Mapping[str, str]) -> None:
    """Prepare a process whose parent has called `make_ready`."""
    if environ.get(VARIABLE) == "1" and multiprocessing.parent_process() is not None:
        _hash()


def compile_kernels(forms: Collection[Format], device: torch.device) -> None:
    """Run each format's quantizer once, in a separate thread. A failure occurs again at the first unit."""

    def run() -> None:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)), contextlib.suppress(RuntimeError):
            weight = torch.zeros(2, 128, 2048, dtype=torch.bfloat16, device=device)
            largest = amax_each(weight)
            for form in forms:
                shared = {"global_scale": global_scale(largest)} if form.family.has_divisor else {}
                quantizer(form).quantize(weight, **shared)

    threading.Thread(target=run, name="stream-compile", daemon=True).start()


def _hash() -> None:
    """Make Triton hash its files; it keeps the result (`triton_key` in triton/runtime/cache.py). A release without it hashes later."""
    try:
        from triton.runtime.cache import triton_key
    except ImportError:
        return
    threading.Thread(target=triton_key, name="stream-compile", daemon=True).start()
