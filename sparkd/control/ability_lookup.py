"""Learns a model's abilities: from its files, then from its engine."""

from __future__ import annotations

import asyncio

from sparkd.control.context import Context
from sparkd.control.record import KnownAbilities, Record
from sparkd.gateway.upstream import ServedModels, Upstream

# After a look at a model's files that ended by an error.
LOOK_AGAIN_S = 60.0


class AbilityLookup:
    def __init__(self, context: Context) -> None:
        self._registry = context.registry
        self._cluster = context.cluster
        self._spawn = context.tasks.spawn
        self._clock = context.clock
        # By model, the last look: the hash of its entry, when it began, and its task.
        self._lookups: dict[str, tuple[str | None, float, asyncio.Task[None]]] = {}

    def look_at_new(self) -> None:
        """Look at the files of every model whose present entry was not looked at; LOOK_AGAIN_S after an error again."""
        for record in self._registry.records.values():
            if record.spec is None or record.abilities is not None:
                continue
            if last := self._lookups.get(record.name):
                entry_hash, begun_s, task = last
                if not task.done() or (entry_hash == record.hash and self._clock() - begun_s < LOOK_AGAIN_S):
                    continue
            self._lookups[record.name] = record.hash, self._clock(), self._spawn(self.look(record), f"abilities {record.name}")

    async def look(self, record: Record) -> None:
        """Read the model's abilities from its files, before an engine reports them."""
        spec = record.spec
        if spec is None or record.abilities is not None:
            return
        abilities = await self._cluster.models.abilities(spec)
        if record.spec is spec and record.abilities is None:
            record.known_abilities = KnownAbilities(record.hash, abilities)

    async def learn(self, record: Record, upstream: Upstream, models: ServedModels) -> None:
        """Ask the engine for the model's abilities. They stay known once the engine has gone."""
        await self.look(record)
        if (before := record.abilities) is not None:
            learned = await self._cluster.models.served_abilities(upstream, before, models)
            if record.abilities is before and record.upstream is upstream:
                record.known_abilities = KnownAbilities(record.hash, learned)
