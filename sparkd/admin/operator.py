"""Adds, changes and removes models, gives them recipes and cancels operations, as the admin API asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from sparkd.capacity.entry_faults import refuse_faulty
from sparkd.checkpoint.source import name_of
from sparkd.cluster.cluster import Cluster
from sparkd.config.config import config_hash, parse_model
from sparkd.config.model import ModelConfig
from sparkd.control.journal import Journal, say_change
from sparkd.control.registry import Registry
from sparkd.errors import CheckpointError, Conflict, ModelUnusable, UnknownModel
from sparkd.nearest import nearest
from sparkd.state.model_state import ModelState
from sparkd.state.nouns import Operation, OperationState, Want


class Operator:
    """`want(name, want, by)` is the supervisor's. Its loop sees an added model with its next look."""

    def __init__(self, want: Callable[[str, Want, str], Operation], registry: Registry, journal: Journal, cluster: Cluster) -> None:
        self._want = want
        self._registry = registry
        self._journal = journal
        self._cluster = cluster

    def meaning(self, source: str) -> dict[str, Any]:
        """The name and the spec that add MODEL: a recipe's name goes before a folder or a hub id. Blocks: it reads the recipes' folders."""
        key = "recipe" if self._registry.config.book().has(source) else "model"
        return {"name": name_of(source), "spec": {key: source}}

    def known(self, meant: Mapping[str, Any], model: str, name: str | None, *, changes: bool) -> str | None:
        """The model that a user means by MODEL, None for one to add.

        meant: what `meaning` says of it.
        model: MODEL as it was typed.
        name: the name for a model to add, also for one that failed for good and shall have other keys.
        changes: whether it shall have other keys.

        Raises UnknownModel for a word that is neither a model nor anything to add, and Conflict for a name that another model
        has, or where a known model would get other keys.
        """
        is_recipe, source, config = "recipe" in meant["spec"], meant["spec"].get("model"), self._registry.config
        names = config.names()
        found = names.get(name or model)
        if found is None and name is None:
            found = next((spec.name for spec in config.models.values() if spec.model == source), None) or names.get(meant["name"])
        if found is None:
            # A bare word is more often a typing error than a hub id without an owner, and a download must not begin with one.
            if name is None and source is not None and "/" not in source:
                raise _unknown(model, names)
            return None
        if model not in names and config.models[found].model != source and not is_recipe:
            raise Conflict(f"A model called {found} exists already, with the source {config.models[found].model}. Choose another --name.")
        if changes:
            self._registry.check_added(found, "change its entry there and reload sparkd, or choose another --name")
            if self._registry.records[found].attempt.lasts:
                return None
            raise Conflict(f"{found} exists already, with other keys. Run `sparkd rm {found}` first, or choose another --name.")
        return found

    def spec_to_plan(self, source: str) -> ModelConfig | None:
        """The entry of the model, or else the recipe, of this name; None for a folder or a hub id.

        Raises UnknownModel for a name that nothing has, ConfigError for a recipe that cannot be used.
        """
        with suppress(UnknownModel):
            return self._registry.find(source).spec
        meant = self.meaning(source)
        config = self._registry.config
        if "recipe" in meant["spec"]:
            return parse_model(meant["name"], meant["spec"], over_admin=True, book=config.book())
        if "/" not in source and not source.startswith((".", "~")):
            raise _unknown(source, config.names())
        return None

    async def unusable(self, name: str, raw: Mapping[str, Any]) -> ModelUnusable | None:
        """Why `add` would take in what is no model; see ModelFiles.unusable. Raises as `add`, and ConfigError for an entry with which a
        READY model would not start again.

        A model that is known by this name may keep its folder: the files of what may run now are the supervisor's business.
        """
        spec, config = self._registry.judged(name, raw), self._registry.config
        record = self._registry.records.get(name)
        is_same = record is not None and record.spec is not None and record.spec.model == spec.model
        if not is_same and (fault := await self._cluster.models.unusable(spec)):
            return fault
        if record is not None and record.state is ModelState.READY and config_hash(spec, config.engine) != record.hash:
            await asyncio.to_thread(refuse_faulty, [spec], config)
        return None

    def add(self, name: str, raw: Mapping[str, Any], *, replace: bool = False) -> None:
        """Take in a model that the configuration file does not have. Adding the same again changes nothing.

        replace: other keys for one that was added before. Raises ConfigError for a specification that cannot be used, Conflict for a name
        that the file or another model has, or that was added with other keys.
        """
        if (change := self._registry.add(name, raw, replace=replace)) is not None:
            say_change(self._journal, change, name, "api")

    async def take_in(self, name: str, raw: Mapping[str, Any], *, replace: bool) -> None:
        """`add` what is a model. Raises as `add` and `unusable`, and CheckpointError with what `unusable` says."""
        # Else it would be tried again and again. Before anybody can see it.
        if fault := await self.unusable(name, raw):
            raise CheckpointError(fault.message)
        self.add(name, raw, replace=replace)

    async def set_recipe(self, name: str, recipe: str) -> str:
        """Give an added model this recipe, under the keys that it has; a name that is free becomes a model of the recipe alone.

        Returns the model's name. Raises as `take_in`, and Conflict for a model of the configuration file that has not this recipe there.
        """
        model, raw = self._registry.with_recipe(name, recipe)
        if raw is not None:
            await self.take_in(model, raw, replace=True)
        return model

    def remove(self, name: str) -> Operation:
        """Unload and forget a model that was added by `add`. Raises Conflict for one of the configuration file."""
        if self._registry.forget_left_out(name):
            operation = self._journal.operations.open("unload", name, "admin")
            self._journal.operations.close(operation.id, OperationState.SUCCEEDED, "It was left out already.")
            return self._journal.operations.find(operation.id)
        record = self._registry.find(name)
        self._registry.check_added(record.name)
        operation = self._want(record.name, Want.STOPPED, "admin")
        self._registry.remove(record)
        say_change(self._journal, "removed", record.name, "api")
        return operation

    def operation(self, operation_id: str) -> Operation:
        """One operation with its progress; NotFound where it is not kept."""
        self._journal.operations.find(operation_id)
        return self._journal.operations.all(self._registry.records)[operation_id]

    def cancel(self, operation_id: str) -> Operation:
        """Cancel a running load (its model is wished STOPPED) or unload (RUNNING again). A cancelled operation stays as it is.

        Raises Conflict for one that ended otherwise, and for one of another kind: the part that runs it cancels it.
        """
        operation = self._journal.operations.find(operation_id)
        if operation.state is OperationState.CANCELLED:
            return operation
        if operation.state is not OperationState.RUNNING:
            ended = f"it has ended already ({operation.state.lower()})"
            raise Conflict(f"The {operation.kind} {operation_id} cannot be cancelled: {ended}.")
        opposite = {"load": Want.STOPPED, "unload": Want.RUNNING}.get(operation.kind)
        if opposite is None:
            raise Conflict(f"The {operation.kind} {operation_id} cannot be cancelled: it ends by itself.")
        record = self._registry.records.get(operation.model)
        if record is None or record.operation != operation_id:
            # The model has gone, or does something else by now.
            self._journal.operations.close(operation_id, OperationState.CANCELLED, "It was cancelled; its model is left as it is.")
        else:
            self._want(operation.model, opposite, "admin")
        return self._journal.operations.find(operation_id)


def _unknown(model: str, names: Collection[str]) -> UnknownModel:
    near = nearest(model, list(names))
    error = UnknownModel(model, list(names))
    hint = f"Did you mean {near}?" if near else "To add a model, give a recipe (`sparkd recipes ls`), a folder or a hub id (owner/name)."
    error.message += f" {hint}"
    return error
