"""Books unified memory: how much each model holds on each node. There is no other book; Ray knows only what each node offers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from sparkd.errors import MemoryReturns, NoRoom
from sparkd.state.memory_book import Held, Lack, MemoryBook


class Reservations:
    """The reservations of all models. A reservation stays while its node is out of sight, where the rank may live on.

    here: the daemon's node.
    offered: returns the GiB that each reachable node offers.
    """

    def __init__(self, here: str, offered: Callable[[], Mapping[str, float]]) -> None:
        self._here = here
        self._offered = offered
        self._cordoned: frozenset[str] = frozenset()
        self._room_gib: Mapping[str, float] = {}
        self._leaked_gib: Mapping[str, float] = {}
        self._held: dict[str, Held] = {}

    def cordon(self, nodes: frozenset[str], room_gib: Mapping[str, float], leaked_gib: Mapping[str, float]) -> None:
        """Until the next call nothing is placed on these nodes. room_gib, leaked_gib: see MemoryBook."""
        self._cordoned, self._room_gib, self._leaked_gib = nodes, dict(room_gib), dict(leaked_gib)

    @property
    def offered(self) -> dict[str, float]:
        """GiB by node, for the nodes that may take a model."""
        return {node: gib for node, gib in self._offered().items() if node not in self._cordoned}

    def book(self) -> MemoryBook:
        return MemoryBook(self.offered, dict(self._held), self._cordoned, self._room_gib, self._leaked_gib)

    def with_room(self, model: str, gib: int) -> list[str]:
        """Nodes that have `gib` free beside the other models, in the book and now: this node first, then the one with the most room."""
        free_gib = self.book().free_gib({model})
        nodes = (node for node, free in free_gib.items() if min(free, self._room_gib.get(node, gib)) >= gib)
        return sorted(nodes, key=lambda node: (node != self._here, -free_gib[node], node))

    def most_free_gib(self, model: str, otherwise: float, nodes: int = 1) -> float:
        """The most GiB that each of `nodes` nodes has free beside the other models; `otherwise` if fewer nodes are reachable."""
        free = sorted(self.book().free_gib({model}).values(), reverse=True)
        return free[nodes - 1] if len(free) >= nodes else otherwise

    def reserve_one(self, model: str, gib: int, only: str | None = None) -> str:
        """Reserve on one node with room and return it. only: the node that it must be. Raises NoRoom with the numbers."""
        for node in self.with_room(model, gib):
            if only in (None, node):
                self.hold(model, gib, [node])
                return node
        raise self.no_room(model, gib, only=only)

    def reserve(self, model: str, gib: int, nodes: Sequence[str]) -> None:
        """Reserve `gib` on each of these nodes, in place of what the model held. Raises NoRoom, and then the model holds what it held."""
        if not set(nodes) <= set(self.with_room(model, gib)):
            raise self.no_room(model, gib, len(nodes))
        self.hold(model, gib, nodes)

    def no_room(self, model: str, gib: int, nodes: int = 1, only: str | None = None) -> NoRoom:
        book, lack = self.book(), Lack(gib, nodes, only)
        if message := book.returning(model, lack):
            return MemoryReturns(message, gib, nodes, only)
        return NoRoom(book.no_room(model, lack), gib, nodes, only)

    def hold(self, model: str, gib: int, nodes: Iterable[str]) -> None:
        """Book memory that an engine uses already, whether or not the book has room for it."""
        self._held[model] = tuple((node, gib) for node in nodes)

    def release(self, model: str) -> None:
        self._held.pop(model, None)

    def reserved_gib(self, node: str) -> int:
        return sum(gib for places in self._held.values() for where, gib in places if where == node)
