"""Owns the wish for a cache, in bytes of the memory that there is: its size, its limits, the margin. Never measures, never rehearses."""

from __future__ import annotations

from collections.abc import Callable

from workers.kv.arithmetic import GIB, CacheCosts, Demand, Reserved, margin_of
from workers.kv.memory import MemoryReading
from workers.kv.settings import BLOCKS_FLAG, SIZES, CacheSettings

# The largest batches of the models that fit one Spark need 2 to 17 GiB for a moment; those of a CPU's models less than one.
PLENTY_BYTES, PLENTY_SHARE = 8 * GIB, 0.5


class CacheRequest:
    """taken: bytes that the whole engine holds of the memory that the cache will be in."""

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
        """The limit that decides in place of the wish; None for nothing."""
        settings = self._settings
        if settings.blocks is None:
            return None
        others = any(getattr(settings, name) is not None for name in (*SIZES, "at_most_bytes", "reserved_bytes"))
        return f"{BLOCKS_FLAG} asks for {settings.blocks:,} blocks{', which overrides kv_cache and memory_gib' if others else ''}"

    def at_most(self) -> int | None:
        """A limit on what `auto` takes; None for none."""
        return self._settings.at_most_bytes

    def reserved(self, reading: MemoryReading) -> Reserved | None:
        """Another one, by what the engine really holds now."""
        whole = self._settings.reserved_bytes
        return None if whole is None else Reserved(whole, self._taken(), reading.ranks_here)

    def limit(self, reading: MemoryReading) -> int | None:
        """Both, where nobody knows what the engine is going to need beside its cache."""
        reserve = self.reserved(reading)
        limits = [limit for limit in (self.at_most(), None if reserve is None else max(0, reserve.left(Demand()))) if limit is not None]
        return min(limits, default=None)

    def is_plenty(self, need: CacheCosts, reading: MemoryReading) -> bool:
        """Whether a cache of the size that was asked for leaves so much that no batch could need it: then nothing has to be rehearsed."""
        size, within = self.asked(need), None
        if size is None:
            reserve = self.reserved(reading)
            size, within = self.at_most(), None if reserve is None else reserve.left(Demand())
        if size is None or (within is not None and within < size + PLENTY_BYTES):
            return False
        left = reading.room - size - self.margin(reading)
        return left >= max(PLENTY_BYTES, int(reading.room * PLENTY_SHARE))

    def margin(self, reading: MemoryReading) -> int:
        """This rank's part of what is to stay free on the machine."""
        requested = self._settings.margin_bytes
        return margin_of(reading.size, None if requested is None else requested // reading.ranks_here)


def _whole(size: float, block: int) -> int:
    return -int(-size // block) * block
