"""Sizes vLLM's KV cache after a rehearsal, from the free memory: worker classes for vLLM's --worker-cls. Never by utilization."""

from __future__ import annotations

from typing import Any

__all__ = ["SparkCPUWorker", "SparkWorker"]


def __getattr__(name: str) -> Any:
    """Import a worker class when vLLM asks for it, so that the arithmetic can be used without vLLM."""
    try:
        if name == "SparkWorker":
            from workers.kv.cuda import SparkWorker

            return SparkWorker
        if name == "SparkCPUWorker":
            from workers.kv.cpu import SparkCPUWorker

            return SparkCPUWorker
    except ImportError as error:
        from workers.kv.stock_worker import in_place_of

        return in_place_of(error)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
