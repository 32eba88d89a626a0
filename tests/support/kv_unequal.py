"""A worker class for two ranks on one host that find different things, as on two nodes: rank 0 has a profile, rank 1 has less memory. Never
sizes by itself.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from tests.support.given_memory import install
from workers.kv.arithmetic import Demand
from workers.kv.memory import MemoryReading
from workers.kv.profiles import MeasuredProfile, Profiles, key_of
from workers.kv.settings import CacheSettings
from workers.vllm.kv.cpu import SparkCPUWorker
from workers.vllm.kv.engine_identity import identity_of


class UnequalWorker(SparkCPUWorker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        install()
        super().__init__(*args, **kwargs)
        self._known = CacheSettings.parse(os.environ)
        if self.rank:
            self._usual = self._rehearsal.read
            self._rehearsal.read = self._less  # type: ignore[method-assign]

    def determine_available_memory(self) -> int:
        if self.rank == 0:
            about = identity_of(self.vllm_config, "cpu", self.rank)
            Profiles(self._known.profiles).keep(key_of(about), MeasuredProfile(Demand(), 1.0), about)
        return super().determine_available_memory()

    def _less(self) -> MemoryReading:
        """Room for the margin and for 1.75 times the cache that is allowed: a batch, which needs about 1 of these, leaves less than all."""
        found = self._usual()
        return replace(found, available=(self._known.margin_bytes or 0) + found.sharers * (self._known.at_most_bytes or 0) * 7 // 4)
