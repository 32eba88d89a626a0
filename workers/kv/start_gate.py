"""Lifts vLLM's condition that gpu_memory_utilization of the memory is free at the start. Never sizes anything."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

# A share of the whole memory: with less than this nothing can start anyway.
GATE = 0.01


@contextlib.contextmanager
def open_gate(cache_config: Any) -> Iterator[None]:
    """While vLLM checks and remembers how much it may take (request_memory in v1/worker/utils.py, CPUWorker.__init__)."""
    before = cache_config.gpu_memory_utilization
    cache_config.gpu_memory_utilization = GATE
    try:
        yield
    finally:
        cache_config.gpu_memory_utilization = before
