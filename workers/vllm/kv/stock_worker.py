"""Substitutes vLLM's own worker for sparkd's, where a release lacks a symbol that sparkd's needs. Never sizes anything.

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

logger = logging.getLogger("vllm.sparkd.kv")


class _Base:
    """A base class, because vLLM adds a worker extension to the bases, which Python refuses where `object` is the only one."""


def in_place_of(error: Exception) -> type:
    """A class by which vLLM creates the platform's own worker. error: why sparkd's worker cannot be imported.

    Raises ImportError where there is no vLLM at all.
    """
    if importlib.util.find_spec("vllm") is None:
        raise error
    reason = f"this vLLM lacks what sparkd's worker is built on ({error})"

    class Stock(_Base):
        def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
            _keep(vllm_config.cache_config, reason, int(kwargs.get("rank", 0)))
            own, extensions = _own(vllm_config, reason), tuple(base for base in cls.__bases__ if base is not _Base)
            return (type(own.__name__, (own, *extensions), {}) if extensions else own)(vllm_config, *args, **kwargs)

    return Stock


def _keep(cache_config: Any, why: str, rank: int) -> None:
    """Pass a requested size in bytes on to vLLM; the log names the settings that are lost."""
    settings = CacheSettings.parse(os.environ)
    size = settings.bytes or settings.at_most_bytes
    if size is not None and getattr(cache_config, "kv_cache_memory_bytes", size) is None:
        cache_config.kv_cache_memory_bytes = size
    addition = "" if size is None else f", {size / 2**30:.2f} GiB"
    lost = [name for name in ("tokens", "sequences", "margin_bytes", "reserved_bytes") if getattr(settings, name) is not None]
    addition += f"; {' and '.join(f'`{name}`' for name in lost)} of kv_cache cannot be kept" if lost else ""
    logger.warning("sparkd: %s; it sizes its KV cache itself, by gpu_memory_utilization%s.", why, addition)
    Report(settings.report, rank).tell("stock", why=f"{why}{addition}")


def _own(vllm_config: Any, why: str) -> type:
    """The platform's default worker class. Raises RuntimeError."""
    config = copy.deepcopy(vllm_config)
    config.parallel_config.worker_cls = "auto"
    try:
        symbol("current_platform").check_and_update_config(config)
        module, _, name = str(config.parallel_config.worker_cls).rpartition(".")
        own: type = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, TypeError, MissingSymbol) as error:
        raise RuntimeError(
            f"The engine cannot start: {why}, and vLLM's own worker is missing too ({error}). Leave out --worker-cls; in sparkd.yaml "
            "kv_cache: {utilization: 0.8} does."
        ) from error
    return own
