"""How ranks of the stub engine meet and need each other, over TCP as vLLM's do. Never answers a client.

Rank 0 listens where --master-addr and --master-port say, and asks each other rank for a sign ten times a second. While one of them gives
none, no request goes on: an engine on NCCL waits like that, for minutes, and its /health goes on to say 200.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress

_ASK_EVERY_S = 0.1
_SILENT_S = 0.7
_AGAIN_S = 0.1
_SIGN = b"%d\n"


class StubTeam:
    """The ranks as the one numbered `rank` of `world` sees them."""

    def __init__(self, rank: int, world: int, host: str, port: int) -> None:
        self._rank = rank
        self._world = world
        self._host = host
        self._port = port
        self._heard_s: dict[int, float] = {}
        self._whole = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @classmethod
    def of(cls, flags: Mapping[str, Sequence[str]]) -> StubTeam | None:
        """None for an engine that is one rank."""
        world = int(flags.get("nnodes", ["1"])[0])
        if world < 2:
            return None
        return cls(int(flags["node-rank"][0]), world, flags["master-addr"][0], int(flags["master-port"][0]))

    async def meet(self, stop: asyncio.Event) -> None:
        """Returns once every rank is there, or at `stop`. Waits for ever otherwise, as a rendezvous does."""
        if self._rank == 0:
            self._server = await asyncio.start_server(self._ask, self._host, self._port)
        else:
            self._tasks.add(asyncio.create_task(self._answer()))
        waiting = [asyncio.ensure_future(one.wait()) for one in (self._whole, stop)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for one in waiting:
            one.cancel()

    def stalled(self) -> bool:
        """Whether a rank has given no sign for a while."""
        return any(time.monotonic() - heard_s > _SILENT_S for heard_s in self._heard_s.values())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the connection of one other rank to rank 0. A rank that has gone stays in the count: no other rank can replace it."""
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        with closing(writer), suppress(OSError):
            while sign := await reader.readline():
                self._heard_s[int(sign)] = time.monotonic()
                if len(self._heard_s) == self._world - 1:
                    self._whole.set()
                await asyncio.sleep(_ASK_EVERY_S)
                writer.write(_SIGN % 0)

    async def _answer(self) -> None:
        """Another rank's side. Rank 0 may not be there yet; once it has gone, this one waits for ever."""
        while True:
            try:
                reader, writer = await asyncio.open_connection(self._host, self._port)
                break
            except OSError:
                await asyncio.sleep(_AGAIN_S)
        with closing(writer), suppress(OSError):
            while True:
                writer.write(_SIGN % self._rank)
                if not await reader.readline():
                    return
                self._whole.set()
