"""Reads the operator's settings of the KV cache in the worker: one JSON object in SPARKD_KV.

The settings are in an environment variable, because vLLM hashes its arguments into the key of its compile cache, and a margin is no reason
to compile again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

VARIABLE = "SPARKD_KV"
# The variable of this project's predecessor (MiB), kept for existing scripts.
SIZES = ("bytes", "tokens", "sequences")
# vLLM's own ways to give the cache a size.
BLOCKS_FLAG = "--num-gpu-blocks-override"
CPU_KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
# A CPU's engine gets this without a configured size.
CPU_KV_CACHE_GIB = 2


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The settings of the KV cache. At most one of bytes, tokens and sequences is set; without it the cache takes all free memory.

    sequences: the number of requests of `at` tokens each (None: of max_model_len).
    at_most_bytes: limits `auto`.
    reserved_bytes: limits the whole engine on this node, with its processes and weights.
    margin_bytes: stays free in addition to the cache; None for the default (workers.host.memory_limits).
    profiles: folder of the profiles of earlier starts, None for none.
    report: file for the result of the sizing, None for none.
    engine: the digest by which the starter of this engine looks up its profile.
    blocks: vLLM's --num-gpu-blocks-override, which is not part of SPARKD_KV. It overrides every size and limit here and in vLLM.
    """

    bytes: int | None = None
    tokens: int | None = None
    sequences: int | None = None
    at: int | None = None
    at_most_bytes: int | None = None
    margin_bytes: int | None = None
    profiles: str | None = None
    report: str | None = None
    reserved_bytes: int | None = None
    engine: str | None = None
    blocks: int | None = None

    @classmethod
    def parse(cls, environ: Mapping[str, str]) -> CacheSettings:
        """The settings in the environment. Raises ValueError that names the wrong setting."""
        text = environ.get(VARIABLE, "").strip()
        settings: Any = {}
        if text:
            try:
                settings = json.loads(text)
            except ValueError:
                raise ValueError(f"{VARIABLE} is not a JSON object.") from None
        if not isinstance(settings, dict):
            raise ValueError(f"{VARIABLE} is not a JSON object.")
        names = [name for name in cls.__dataclass_fields__ if name != "blocks"]
        if unknown := sorted(settings.keys() - set(names)):
            raise ValueError(f"{VARIABLE} has no {unknown[0]!r}; it has {', '.join(names)}.")
        for name, value in settings.items():
            _check(name, value)
        sizes = [name for name in SIZES if settings.get(name) is not None]
        if len(sizes) > 1:
            raise ValueError(f"{VARIABLE} says {' and '.join(f'`{size}`' for size in sizes)}: one of them is enough.")
        if settings.get("at") is not None and settings.get("sequences") is None:
            raise ValueError(f"{VARIABLE} says `at` and no `sequences`.")
        return cls(**settings)

    def or_vllms(self, cache_config: Any) -> CacheSettings:
        """These settings, with the size of vLLM's --kv-cache-memory-bytes (on a CPU also VLLM_CPU_KVCACHE_SPACE) where they have none.
        --num-gpu-blocks-override overrides every size."""
        blocks = getattr(cache_config, "num_gpu_blocks_override", None)
        if blocks is not None:
            return replace(self, blocks=int(blocks))
        size = getattr(cache_config, "kv_cache_memory_bytes", None)
        if not size or any(getattr(self, name) is not None for name in SIZES):
            return self
        return replace(self, bytes=int(size))


def _check(name: str, value: Any) -> None:
    if value is None:
        return
    if name in ("profiles", "report", "engine"):
        if not isinstance(value, str) or not value:
            raise ValueError(f"{VARIABLE}: `{name}` must be {'a name' if name == 'engine' else 'a path'}.")
        return
    least = 0 if name == "margin_bytes" else 1
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{VARIABLE}: `{name}` must be a whole number of at least {least}.")
