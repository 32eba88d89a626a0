"""Books unified memory: how much each model holds on each node, in the daemon's book and in Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from sparkd.cluster.ray_connection import RayLink
from sparkd.errors import ClusterError, MemoryReturns, NoRoom
from sparkd.state.memory_book import Held, Lack, MemoryBook

log = logging.getLogger("sparkd.cluster")

PLACE_TIMEOUT_S = 20.0
PLACE_AGAIN_TIMEOUT_S = 5.0


class Places:
    """The reservations of all models. The daemon's book overrides Ray's: Ray forgets those of a node that it lost, whose rank lives on.

    `here` is the daemon's node; `offered()` returns the GiB that each reachable node offers.
    """

    def __init__(self, link: RayLink, here: str, offered: Callable[[], Mapping[str, float]]) -> None:
        self._link = link
        self._here = here
        self._offered = offered
        self._shut: frozenset[str] = frozenset()
        self._room_gib: Mapping[str, float] = {}
        self._held: dict[str, Held] = {}
        # One change of Ray's groups at a time: a late release must not free memory that was reserved since.
        self._change = asyncio.Lock()

    def shut(self, nodes: frozenset[str], room_gib: Mapping[str, float]) -> None:
        """Nothing is placed on these until they are named no more, and no more than room_gib on those."""
        self._shut, self._room_gib = nodes, dict(room_gib)

    @property
    def offered(self) -> dict[str, float]:
        """GiB by node, for the nodes that may take a model."""
        return {node: gib for node, gib in self._offered().items() if node not in self._shut}

    def book(self) -> MemoryBook:
        return MemoryBook(self.offered, dict(self._held), self._shut, self._room_gib)

    def with_room(self, model: str, gib: int) -> list[str]:
        """Nodes that have `gib` free beside the other models, in the book and now: this node first, then the one with the most room."""
        free_gib = self.book().free_gib({model})
        nodes = (node for node, free in free_gib.items() if min(free, self._room_gib.get(node, gib)) >= gib)
        return sorted(nodes, key=lambda node: (node != self._here, -free_gib[node], node))

    def most_free_gib(self, model: str, otherwise: float, nodes: int = 1) -> float:
        """The most GiB that each of `nodes` nodes has free beside the other models; `otherwise` if fewer nodes are reachable."""
        free = sorted(self.book().free_gib({model}).values(), reverse=True)
        return free[nodes - 1] if len(free) >= nodes else otherwise

    async def reserve_one(self, model: str, gib: int, only: str | None = None) -> str:
        """Reserve on one node with room and return it. only: the node that it must be. Raises NoRoom with the numbers."""
        for node in self.with_room(model, gib):
            if only in (None, node) and await self._reserve(model, gib, [node]):
                return node
        raise self.no_room(model, gib, only=only)

    async def reserve(self, model: str, gib: int, nodes: Sequence[str], *, devices: bool = False) -> None:
        """Reserve `gib` on each of these nodes. devices: see RayLink.reserve. Raises NoRoom if Ray has less there."""
        if not await self._reserve(model, gib, nodes, devices=devices):
            raise self.no_room(model, gib, len(nodes))

    def no_room(self, model: str, gib: int, nodes: int = 1, only: str | None = None) -> NoRoom:
        book, lack = self.book(), Lack(gib, nodes, only)
        if message := book.returning(model, lack):
            return MemoryReturns(message, gib, nodes, only)
        return NoRoom(book.no_room(model, lack), gib, nodes, only)

    def hold(self, model: str, gib: int, nodes: Iterable[str]) -> None:
        """Book the memory that an adopted model uses already. `again` reserves it in Ray."""
        self._held[model] = tuple((node, gib) for node in nodes)

    async def again(self, nodes: Iterable[str]) -> None:
        """Reserve in Ray again what the models hold on these nodes."""
        fresh = set(nodes)
        for model, places in list(self._held.items()):
            if not fresh.isdisjoint(node for node, _ in places):
                async with self._change:
                    await self._restore(model)

    async def reconcile(self, there: Collection[str], unseen: Collection[str]) -> None:
        """Make Ray's groups match the book. The groups outlive the daemon: one that was not released would stay for ever.

        there: models of which ranks were seen. unseen: nodes that do not answer. Raises RayUnavailable.
        """
        groups = await self._link.kept_groups()
        for model, nodes in groups.items():
            async with self._change:
                if model in self._held or model in there or not nodes.isdisjoint(unseen):
                    continue
                log.warning(
                    "Ray reserves memory for %s on %s, which does not run there: the memory is released", model, " and ".join(nodes)
                )
                await self._link.release(model)
        seen = self._offered().keys()
        for model, places in list(self._held.items()):
            if model not in groups and seen >= {node for node, _ in places}:
                async with self._change:
                    await self._restore(model)

    async def release(self, model: str) -> None:
        """Release the model's memory. If Ray does not release it now, `reconcile` does so later."""
        self._held.pop(model, None)
        async with self._change:
            if model in self._held:
                return
            try:
                await self._link.release(model)
            except ClusterError as error:
                log.warning("the memory of %s is still reserved: %s", model, error.message)

    async def _reserve(self, model: str, gib: int, nodes: Sequence[str], *, devices: bool = False) -> bool:
        """Reserve for a start. Where Ray refuses, it keeps what the book has for the model: a rank on a node out of sight may use that."""
        async with self._change:
            await self._link.release(model)
            if await self._link.reserve(model, gib, nodes, PLACE_TIMEOUT_S, devices=devices):
                self._held[model] = tuple((node, gib) for node in nodes)
                return True
            await self._restore(model)
        return False

    async def _restore(self, model: str) -> None:
        """Reserve in Ray where the model runs, unless Ray has a group of it: one that is made anew ends the Ray actors in it, and may be
        refused. If Ray has no room there, log that: the model runs already."""
        places = self._held.get(model)
        if places is None or model in await self._link.kept_groups():
            return
        nodes, gib = [node for node, _ in places], places[0][1]
        if not await self._link.reserve(model, gib, nodes, PLACE_AGAIN_TIMEOUT_S):
            log.warning("%s runs on %s, and Ray has no %d GiB left there to reserve for it", model, " and ".join(nodes), gib)

    def reserved_gib(self, node: str) -> int:
        return sum(gib for places in self._held.values() for where, gib in places if where == node)
