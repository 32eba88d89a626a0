"""A book of unified memory: which model holds how much on which nodes, and whether another has room."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

# (node, GiB) of each rank.
Held = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Lack:
    """A model asked for this when there was no room for it.

    gib: whole GiB on each of so many nodes
    only: the one node it can be on
    """

    gib: int
    nodes: int = 1
    only: str | None = None


@dataclass(frozen=True, slots=True)
class MemoryBook:
    """offered: by node that is in sight and open, the GiB that it lends.
    held: by model.
    cordoned: the nodes on which nothing is started now.
    room_gib: by node to which memory of an ended engine returns, what a load may need that begins there now.
    leaked_gib: by node, memory of an ended engine that did not return and that nothing else can have.
    """

    offered: Mapping[str, float] = field(default_factory=dict)
    held: Mapping[str, Held] = field(default_factory=dict)
    cordoned: Collection[str] = ()
    room_gib: Mapping[str, float] = field(default_factory=dict)
    leaked_gib: Mapping[str, float] = field(default_factory=dict)

    @property
    def cordon_message(self) -> str:
        """A sentence, and empty where no node is cordoned."""
        return f"Nothing is started on {' or '.join(sorted(self.cordoned))} now: `sparkd status` says why." if self.cordoned else ""

    def free_gib(self, without: Collection[str] = ()) -> dict[str, float]:
        """node -> GiB that no model holds, if the models of `without` held nothing."""
        free = {node: gib - self.leaked_gib.get(node, 0.0) for node, gib in self.offered.items()}
        for model, places in self.held.items():
            for node, gib in places:
                if model not in without and node in free:
                    free[node] -= gib
        return free

    def has_room(self, model: str, lack: Lack, without: Collection[str] = ()) -> bool:
        """Whether so much is free on so many nodes, what `model` itself holds not counted."""
        free = self.free_gib({model, *without})
        return sum(gib >= lack.gib for node, gib in free.items() if lack.only in (None, node)) >= lack.nodes

    def no_room(self, model: str, lack: Lack) -> str:
        """Why the model has to wait, and which model's end would make room."""
        free = {node: gib for node, gib in self.free_gib({model}).items() if lack.only in (None, node)}
        rows = [(gib, name, node) for name, places in self.held.items() if name != model for node, gib in places if node in free]
        names = list(dict.fromkeys(name for gib, name, node in sorted(rows) if free[node] + gib >= lack.gib))
        unload = f"Unload {' or '.join(names[:3])}" if names else "Unload some (`sparkd ps`)"
        where = "one node" if lack.nodes == 1 else f"each of {lack.nodes} nodes"
        left = ", ".join(f"{node} {gib:.0f} of {self.offered[node]:.0f}" for node, gib in free.items())
        return (
            f"{model} asks for {lack.gib} GiB of unified memory on {where}, but other models hold too much of it; free GiB: {left}. "
            f"{unload}, give kv_cache a size, or set memory_gib to its real need. {self.cordon_message}"
        ).rstrip()

    def returning(self, model: str, lack: Lack) -> str | None:
        """Why the model has to wait although no other holds the memory, as a sentence; None if the memory is free now."""
        fitting = [node for node, gib in self.free_gib({model}).items() if gib >= lack.gib and lack.only in (None, node)]
        waited_for = [node for node in fitting if self.room_gib.get(node, lack.gib) < lack.gib]
        if len(fitting) - len(waited_for) >= lack.nodes or not waited_for:
            return None
        free = ", ".join(f"{self.room_gib[node]:.0f} GiB on {node}" for node in sorted(waited_for))
        return f"It waits for the memory of a stopped engine to come back: it needs {lack.gib} GiB and may take {free} now."
