"""Puts vLLM's own worker in the place of sparkd's, where a release lacks what sparkd's is built on. Never sizes anything.

Importing this module imports no vLLM.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import logging
import os
from typing import Any

from sparkd.errors import MissingSymbol
from workers.kv.report import Report
from workers.kv.settings import CacheSettings
from workers.vllm.symbols import symbol


def in_place_of(error: Exception) -> type:
    """A class by which vLLM creates the platform's own worker. error: why sparkd's worker cannot be imported; it is raised where there is
    no vLLM at all."""
    if importlib.util.find_spec("vllm") is None:
        raise error

    lacks = f"it has no {error.symbol}" if isinstance(error, MissingSymbol) else error

    class StockWorker:
        def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
            settings, cache = CacheSettings.parse(os.environ), vllm_config.cache_config
            cache.kv_cache_memory_bytes = cache.kv_cache_memory_bytes or settings.bytes or settings.at_most_bytes
            size = "gpu_memory_utilization" if cache.kv_cache_memory_bytes is None else f"{cache.kv_cache_memory_bytes / 2**30:.2f} GiB"
            why = f"sparkd's worker cannot run in this vLLM ({lacks}), which sizes its KV cache itself, by {size}"
            logging.getLogger("vllm.sparkd.kv").warning("sparkd: %s.", why)
            Report(settings.report, int(kwargs.get("rank", 0))).tell("stock", why=why)
            config = copy.deepcopy(vllm_config)
            config.parallel_config.worker_cls = "auto"
            symbol("current_platform").check_and_update_config(config)
            module, _, name = str(config.parallel_config.worker_cls).rpartition(".")
            return getattr(importlib.import_module(module), name)(vllm_config, *args, **kwargs)

    return StockWorker
