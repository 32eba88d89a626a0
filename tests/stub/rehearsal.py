"""How a stub engine sizes a KV cache that it does not have: the worker's own way through a pretended machine. Never takes memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.stub.load import pause
from workers.kv import sizing
from workers.kv.arithmetic import GIB, CacheCosts, Demand
from workers.kv.memory import MemoryReading
from workers.kv.settings import CacheSettings

_FLAG = "worker-cls"
_OURS = "workers.kv."
# The cache in the stub's log where vLLM sizes: 1.0 GiB for 524,288 tokens.
BYTES_PER_TOKEN = 2048
BLOCK_TOKENS = 16
MAX_MODEL_LEN = 4096
# The pretended machine has so much left.
ROOM_BYTES = 64 * GIB


class CacheRefused(Exception):
    """The cache does not fit; the sentence is the worker's."""


@dataclass(frozen=True, slots=True)
class Size:
    """of: tokens of one request of full length."""

    gib: float
    tokens: int
    of: int

    @property
    def requests(self) -> float:
        return self.tokens / self.of


class StubKv:
    """The stub's KV cache: sized by workers.kv where the command line names one of its worker classes, else the stub's usual 1 GiB."""

    def __init__(self, flags: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> None:
        """SystemExit where the settings cannot be read, as the worker."""
        length = (flags.get("max-model-len") or [""])[0]
        self._of = int(length) if length.isdecimal() and int(length) else MAX_MODEL_LEN
        self._machine: _Machine | None = None
        if not (flags.get(_FLAG) or [""])[0].startswith(_OURS):
            return
        try:
            settings = CacheSettings.parse(environ)
        except ValueError as wrong:
            raise SystemExit(f"stub: {wrong}") from None
        per_request = self._of * BYTES_PER_TOKEN
        need = CacheCosts(per_request, per_request + BLOCK_TOKENS * BYTES_PER_TOKEN, self._of)
        self._need = need
        self._machine = _Machine()
        about = {"stub": flags.get("served-model-name"), "room": ROOM_BYTES, "length": self._of}
        self._sizing = sizing.Sizing(self._machine, settings, lambda: need, lambda: about)

    async def size(self, stop: asyncio.Event, seconds: float) -> Size:
        """seconds: how long a rehearsal takes, unless the process is to end. Raises CacheRefused."""
        if self._machine is None:
            await pause(stop, seconds)
            return Size(1.0, GIB // BYTES_PER_TOKEN, self._of)
        self._machine.seconds = seconds
        # A pretended machine does not breathe.
        sizing.WINDOW_S = sizing.KNOWN_WINDOW_S = 0.0
        working = asyncio.create_task(asyncio.to_thread(self._sizing.determine, lambda _limit: GIB))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        self._machine.ended.set()
        stopping.cancel()
        try:
            pool_bytes = await working
        except ValueError as sentence:
            raise CacheRefused(str(sentence)) from None
        self._machine.pool_bytes = pool_bytes
        requests = pool_bytes / self._need.per_request
        self._sizing.allocated(requests)
        return Size(pool_bytes / GIB, int(requests * self._of), self._of)

    def ready(self) -> None:
        if self._machine is not None:
            self._sizing.ready()


class _Machine:
    """A machine of ROOM_BYTES on which only the stub lives. pool_bytes: of its cache."""

    def __init__(self) -> None:
        self.pool_bytes = 0
        self.seconds = 0.0
        self.ended = threading.Event()

    def warm(self) -> int:
        return 0

    def rehearse(self, scale: float) -> Demand:
        self.ended.wait(self.seconds)
        return Demand(peak=GIB // 16, weights=GIB // 4)

    def keep(self) -> None: ...

    def read(self) -> MemoryReading:
        room = ROOM_BYTES - self.pool_bytes
        return MemoryReading(ROOM_BYTES, room, room, 0)

    def watch(self) -> MemoryReading:
        return self.read()

    def taken(self) -> int:
        return GIB // 4

    def idle(self) -> int:
        return 0

    def mark(self) -> None:
        return

    def taken_by_batch(self) -> int:
        return 0
