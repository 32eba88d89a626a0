"""A worker class for two ranks on one host that find different things, as on two nodes: rank 1 has less memory. Never sizes by itself."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from tests.support.given_memory import install
from workers.kv.memory import MemoryReading
from workers.kv.settings import CacheSettings
from workers.vllm.kv.cpu import ASSUMED, SparkCPUWorker


class UnequalWorker(SparkCPUWorker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        install()
        super().__init__(*args, **kwargs)
        self._known = CacheSettings.parse(os.environ)
        if self.rank:
            self._usual = self._rehearsal.read
            self._rehearsal.read = self._less  # type: ignore[method-assign]

    def _less(self) -> MemoryReading:
        """Room for the margin, a batch and three quarters of the cache that is allowed."""
        found, at_most = self._usual(), self._known.at_most_bytes or 0
        return replace(found, available=(self._known.margin_bytes or 0) + found.sharers * (ASSUMED.ahead + at_most * 3 // 4))
