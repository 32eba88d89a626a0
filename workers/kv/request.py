"""Works out the requested size of a KV cache in bytes, its limits and the margin."""

from __future__ import annotations

from collections.abc import Callable

from workers.host.memory_limits import spare
from workers.kv.arithmetic import GIB, CacheCosts, Demand, Reserved
from workers.kv.memory import MemoryReading
from workers.kv.settings import BLOCKS_FLAG, SIZES, CacheSettings

# The largest batches of models that fit one Spark have a passing need of 2 to 17 GiB; those of a CPU's models of less than one.
PLENTY_BYTES, PLENTY_SHARE = 8 * GIB, 0.5


class CacheRequest:
    """taken: measures the bytes that the whole engine holds in the memory of the cache."""

    def __init__(self, settings: CacheSettings, taken: Callable[[], int]) -> None:
        self._settings = settings
        self._taken = taken

    def asked(self, need: CacheCosts) -> int | None:
        """Bytes of a cache of a given size; None for all that is left. The block that vLLM keeps for itself is added."""
        settings = self._settings
        block = need.per_block
        if settings.blocks is not None:
            return settings.blocks * block
        if settings.bytes is not None:
            return settings.bytes
        if settings.tokens is not None:
            return _whole(settings.tokens * need.per_token, block) + block
        if settings.sequences is not None:
            tokens = min((settings.at or need.max_model_len) + need.lookahead, need.max_model_len)
            return settings.sequences * _whole(need.request(tokens), block) + block
        return None

    def why(self) -> str | None:
        """The setting that overrides the others, in words; None without one."""
        settings = self._settings
        if settings.blocks is None:
            return None
        others = any(getattr(settings, name) is not None for name in (*SIZES, "at_most_bytes", "reserved_bytes"))
        return f"{BLOCKS_FLAG} asks for {settings.blocks:,} blocks{', which overrides kv_cache and memory_gib' if others else ''}"

    def reserved(self, reading: MemoryReading) -> Reserved | None:
        """The limit by reserved_bytes and the engine's present memory; None without a limit."""
        whole = self._settings.reserved_bytes
        return None if whole is None else Reserved(whole, self._taken(), reading.sharers)

    def limit(self, reading: MemoryReading) -> int | None:
        """The smaller of both limits, while the engine's further demand is unknown."""
        own, reserve = self._settings.at_most_bytes, self.reserved(reading)
        if reserve is None:
            return own
        left = max(0, reserve.left(Demand()))
        return left if own is None else min(own, left)

    def is_plenty(self, need: CacheCosts, reading: MemoryReading) -> bool:
        """Whether the requested cache leaves enough for any batch, so that the rehearsal can be skipped."""
        size, within = self.asked(need), None
        if size is None:
            reserve = self.reserved(reading)
            size, within = self._settings.at_most_bytes, None if reserve is None else reserve.left(Demand())
        if size is None or (within is not None and within < size + PLENTY_BYTES):
            return False
        left = reading.room - size - self.margin(reading)
        return left >= max(PLENTY_BYTES, int(reading.room * PLENTY_SHARE))

    def margin(self, reading: MemoryReading) -> int:
        """This rank's part of the memory that stays free on the machine."""
        margin = self._settings.margin_bytes
        if margin is None:
            margin = spare(reading.size * reading.sharers, shared=reading.is_shared)
        return margin // reading.sharers


def _whole(size: float, block: int) -> int:
    return -int(-size // block) * block
