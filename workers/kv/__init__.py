"""Sizes vLLM's KV cache after a rehearsal, from the free memory: worker classes for vLLM's --worker-cls. Never by utilization."""

from __future__ import annotations

import importlib
from typing import Any

# The names are those that engines are started with; what they name needs vLLM, which this package does not.
_CLASSES = {"SparkWorker": "workers.vllm.kv.cuda", "SparkCPUWorker": "workers.vllm.kv.cpu"}
__all__ = ["SparkCPUWorker", "SparkWorker"]


def __getattr__(name: str) -> Any:
    """Import a worker class when vLLM asks for it, so that the arithmetic can be used without vLLM."""
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sparkd.errors import MissingSymbol

    try:
        return getattr(importlib.import_module(_CLASSES[name]), name)
    except (ImportError, MissingSymbol) as error:
        return importlib.import_module("workers.vllm.kv.stock_worker").in_place_of(error)
