"""Bypasses vLLM's check that the share gpu_memory_utilization of the memory is free at the start. Never sizes anything."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

# The share of the whole memory that must still be free: with less no engine can start.
GATE = 0.01


@contextlib.contextmanager
def open_gate(cache_config: Any) -> Iterator[None]:
    """A context with a low utilization, for vLLM's check of free memory (request_memory in v1/worker/utils.py, CPUWorker.__init__)."""
    before = cache_config.gpu_memory_utilization
    cache_config.gpu_memory_utilization = GATE
    try:
        yield
    finally:
        cache_config.gpu_memory_utilization = before
