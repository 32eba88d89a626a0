"""Owns the peers that are listed with the nodes: machines seen at the last look at the cables, kept for seconds. Never joins a machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

KEPT_S = 10.0
# A watcher of the nodes must not wait for a machine that is gone.
LOOK_TIMEOUT_S = 1.5


class Offers:
    """look: asks every node: too slow for a client that polls each second."""

    def __init__(self, look: Callable[[], Awaitable[Mapping[str, Any]]], clock: Callable[[], float] = time.monotonic) -> None:
        self._look = look
        self._clock = clock
        self._kept: list[dict[str, Any]] = []
        self._at_s = float("-inf")

    async def now(self) -> list[dict[str, Any]]:
        """The fields of a Peer and the text `told` of each peer. The earlier list where a node is slower than LOOK_TIMEOUT_S."""
        if self._clock() - self._at_s >= KEPT_S:
            self._at_s = self._clock()
            try:
                async with asyncio.timeout(LOOK_TIMEOUT_S):
                    self._kept = list((await self._look())["offered"])
            except TimeoutError:
                pass
        return self._kept
