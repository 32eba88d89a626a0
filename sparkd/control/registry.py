"""Which models there are: the file's and those added while it runs, their names and their records."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from sparkd.condition import Condition
from sparkd.config.config import Config, config_hash, parse_model
from sparkd.config.model import ModelConfig
from sparkd.control.record import Record
from sparkd.errors import Conflict, SparkdError, StateError, UnknownModel
from sparkd.state.model_state import ModelState
from sparkd.state.nouns import Desired, Want
from sparkd.state.store import Store
from sparkd.unexpected import unexpected
from sparkd.vllm.logging_args import remark

# Each is parsed when it is added, and again with each new configuration of the file.
MOST_ADDED = 256
# The actors that unload a model without an operator's word: a preloaded model comes back with the next start.
OWN_WISHES = ("ttl", "request", "config", "guard", "swap", "group")

log = logging.getLogger("sparkd.supervisor")


class Registry:
    """One record for each model, found by any of its names. `config` is the file's configuration with the added models on top.

    of_serve: names of the models that `sparkd serve --model` was started with.
    """

    def __init__(
        self, config: Config, store: Store, clock: Callable[[], float], wall: Callable[[], float], of_serve: Collection[str] = ()
    ) -> None:
        self._store = store
        self._of_serve = of_serve
        self._clock = clock
        self.wall = wall
        self._names: dict[str, str] = {}
        self.records: dict[str, Record] = {}
        self._loud: dict[str, str] = {}
        # Models that a bench has for a while, in memory only: a daemon that is killed has none of them when it starts again.
        self.lent: dict[str, ModelConfig] = {}
        # By added model: its keys as the caller gave them.
        self._added: dict[str, dict[str, Any]] = {}
        # By added model that cannot be used: why.
        self._left_out: dict[str, str] = {}
        self.config = config
        self.configure(config)

    def find(self, name: str, *, configured: bool = False) -> Record:
        """By name or alias; UnknownModel names the known ones. configured: not one that was removed and is only seen to its end."""
        record = self.records.get(self._names.get(name, ""))
        if record is None or (configured and record.spec is None):
            raise self._unknown(name)
        return record

    def spec(self, name: str) -> ModelConfig:
        """The entry of a model, by name or alias. Raises UnknownModel, also for one that was removed and is only seen to its end."""
        spec = self.find(name).spec
        if spec is None:
            raise self._unknown(name)
        return spec

    def configure(self, base: Config) -> dict[str, list[str]]:
        """Take the file's configuration. A model that it no longer has is forgotten once it is STOPPED.

        The caller ends the wishes for those (DesiredStates.end_removed).

        The changes, names of models: added, removed, restarted, adjusted (what its engine does not see: ttl, priority, aliases), and
        preload: that are to be loaded at start from now on.
        """
        self._base, self._added = base, self._store.wishes.specs()
        return self._take(self._with_added())

    def _take(self, config: Config) -> dict[str, list[str]]:
        """Bring names and records into line with the models of `config`. See `configure`."""
        base, added, stored = self._base, self._added, self._store.wishes.desired()
        before = {name: record.hash for name, record in self.records.items() if record.spec}
        specs = {name: record.spec for name, record in self.records.items() if record.spec}
        preloaded = self.config.preload()
        self.config = config
        models = self.config.models
        self._note_loud()
        for name in set(self.records) - set(models):
            record = self.records[name]
            record.spec = record.hash = None
            if record.state is ModelState.STOPPED:
                del self.records[name]
        # A model that comes back later, under the same name, is not loaded because of what was wished for the one that has gone.
        for name in stored.keys() - models.keys() - added.keys():
            try:
                self._store.wishes.forget_desired(name)
            except StateError as error:
                log.warning("the desired state of %s, which is not a model any more, could not be removed: %s", name, error.message)
        for name, spec in models.items():
            if name not in self.records:
                desired = stored.get(name) or Desired(name, Want.STOPPED, 0, "config", self.wall())
                self.records[name] = Record(name, desired, self._clock(), self.wall())
            record = self.records[name]
            record.spec = spec
            record.origin = "serve" if name in self._of_serve else "file" if name in base.models else "api"
            record.hash = config_hash(spec, self.config.engine)
        self._names = {name: name for name in self.records} | self.config.names()
        self.ties = self.config.groups.ties(self._names)
        hashes = {name: record.hash for name, record in self.records.items() if record.spec}
        stays = [name for name in hashes.keys() & before.keys() if hashes[name] == before[name]]
        return {
            "added": sorted(hashes.keys() - before.keys()),
            "removed": sorted(before.keys() - hashes.keys()),
            "restarted": sorted(name for name in hashes.keys() & before.keys() if hashes[name] != before[name]),
            "adjusted": sorted(name for name in stays if self.records[name].spec != specs[name]),
            "preload": [name for name in self.config.preload() if name not in preloaded],
        }

    def judged(self, name: str, raw: Mapping[str, Any]) -> ModelConfig:
        """The entry that `add` would accept. Raises the same errors and changes nothing."""
        spec = parse_model(name, raw, over_admin=True, book=self._base.book())
        self.check_added(name, "change it there and reload sparkd")
        for alias in spec.served_names():
            if self._names.get(alias, name) != name:
                key = "name" if alias == name else "served_model_name" if alias in spec.served_model_name else "aliases"
                raise Conflict(f"{alias!r} is a name of the model {self._names[alias]} already: choose another.", param=key)
        self.config.with_model(spec)  # raises what would leave it out
        return spec

    def add(self, name: str, raw: Mapping[str, Any], *, replace: bool) -> str | None:
        """Add a model. Returns `added`, `changed`, or None if the same entry was there.

        replace: other keys for one that was added before; one that failed for good may always have them.
        """
        spec = self.judged(name, raw)
        standing = self._added.get(name)
        if standing is None and len(self._added) >= MOST_ADDED:
            cure = "remove one (`sparkd rm MODEL`), or write this one into the configuration file"
            raise Conflict(f"{MOST_ADDED} models were added already, and sparkd keeps no more: {cure}.", param="name")
        if standing is not None and _text(standing) == _text(raw):
            return None
        record = self.records.get(name)
        if standing is not None and not replace and not (record and record.attempt.lasts):
            raise Conflict(
                f"A model {name} was added already, with other keys: PUT /admin/v1/models/{name} changes it, `sparkd rm {name}` ends it."
            )
        self._store.wishes.save_spec(name, raw)
        self._added[name] = dict(raw)
        self._left_out.pop(name, None)
        self._take(self.config.with_model(spec))
        return "added" if standing is None else "changed"

    def lend(self, name: str, spec: ModelConfig | None) -> None:
        """Have a bench's model until this daemon ends, or forget it where spec is None. Raises Conflict for a taken name, ConfigError."""
        if spec is None:
            if self.lent.pop(name, None) is not None:
                self._take(self.config.without_model(name))
            return
        standing = self.records.get(self._names.get(name, ""))
        if (standing is not None and standing.spec is not None) or name in self._left_out:
            raise Conflict(f"{name!r} is a name already: remove that model.", param="name")
        config = self.config.with_model(spec)
        self.lent[name] = spec
        self._take(config)

    def model_places(self) -> tuple[str, ...]:
        """See Config.model_places."""
        return self._base.model_places()

    def with_recipe(self, name: str, recipe: str) -> tuple[str, dict[str, Any] | None]:
        """The model of this name, and the keys that it gets with this recipe; None for one of the configuration file that has it there.

        Raises Conflict for one that has another there.
        """
        model = self._names.get(name, name)
        configured = self._base.models.get(model)
        if configured is None:
            return model, {**self._added.get(model, {}), "recipe": recipe}
        if configured.recipe != recipe:
            cure = f"set `recipe: {recipe}` there and reload sparkd, or load the recipe under a name that is not taken"
            self.check_added(model, cure)
        return model, None

    def remove(self, record: Record) -> None:
        """Forget a model that was added by `add`. Raises Conflict for one of the configuration file."""
        self.check_added(record.name)
        self.lent.pop(record.name, None)
        self._forget_added(record.name)
        self._take(self.config.without_model(record.name))

    def forget_left_out(self, name: str) -> bool:
        """Forget an added model that cannot be used; False where `name` is none."""
        if name not in self._left_out:
            return False
        self._forget_added(name)
        self._take(self.config)
        return True

    def _forget_added(self, name: str) -> None:
        self._store.wishes.forget_spec(name)
        self._added.pop(name, None)
        self._left_out.pop(name, None)

    def check_added(self, name: str, change: str | None = None) -> None:
        """Raise Conflict for a model that was not added by `add`.

        change: how one of the configuration file gets other keys; None where the model shall be removed.
        """
        if name in self._of_serve:
            how = f"`sparkd unload {name}` unloads it, and it is gone when `sparkd serve` ends (Ctrl-C)"
            if change is not None:
                how = "choose another name (--name), or end `sparkd serve` (Ctrl-C) and start it anew"
            raise Conflict(f"The model {name} is the one that `sparkd serve` was started with: {how}.", param="name")
        if name in self._base.models:
            cure = change or "take it out there and reload sparkd"
            raise Conflict(f"The model {name} is in the configuration file: {cure}.", param="name")

    def _unknown(self, name: str) -> UnknownModel:
        return UnknownModel(name, [record.name for record in self.records.values() if record.spec and not record.spec.unlisted])

    def missing(self) -> list[Record]:
        """Models that the configuration preloads and that no operator has unloaded since. A model that only a request has started is one of
        them too, because the request may be withdrawn."""
        wanted = [(self.records[name], self.records[name].desired) for name in self.config.preload()]
        return [
            record
            for record, wish in wanted
            if (wish.by == "request" if wish.want is Want.RUNNING else wish.generation == 0 or wish.by in OWN_WISHES)
        ]

    @property
    def conditions(self) -> list[Condition]:
        """Added models that are left out, and why; models whose engines write what is said to them into their logs, or fetch whatever a
        request names."""
        left_out = [
            Condition(
                "ModelLeftOut",
                f"{name}, which was added earlier, cannot be used: {reason} Add it again, or remove it with `sparkd rm {name}`.",
            )
            for name, reason in self._left_out.items()
        ]
        unguarded = [
            Condition(
                "MediaUnguarded",
                f"{name}: an earlier release of sparkd started its engine, which fetches media from any address that a request names. "
                f"Run `sparkd unload {name}` and `sparkd load {name}`.",
            )
            for name, record in self.records.items()
            if self._fetches_anything(record)
        ]
        loud = [Condition("LogsAnswers", f"{name}: {remark}") for name, remark in self._loud.items()]
        return [*left_out, *loud, *unguarded]

    def _fetches_anything(self, record: Record) -> bool:
        """A release that wrote no parsers into its handles gave its engines no rule for media either."""
        if record.spec is None or record.attempt.handle is None or not record.attempt.adopted:
            return False
        return record.spec.runs_vllm(self.config.engine) and record.attempt.handle.parsers is None

    def _note_loud(self) -> None:
        before = self._loud
        remarks = {name: remark(spec.vllm_flags(), spec.environment(self.config.engine)) for name, spec in self.config.models.items()}
        self._loud = {name: sentence for name, sentence in remarks.items() if sentence is not None}
        for name in self._loud.keys() - before.keys():
            log.warning("the model %s: %s", name, self._loud[name])

    def _with_added(self) -> Config:
        """The file's configuration with the other models, but for those that this release refuses or whose names the file has by now."""
        config, book = self._base, self._base.book()
        self._left_out = {}
        for name, raw in self._added.items():
            if name in config.models:
                continue
            try:
                config = config.with_model(parse_model(name, raw, over_admin=True, book=book))
            except SparkdError as error:
                self._left_out[name] = error.message
            except Exception as error:
                # The last boundary of a row that another release may have written: it must not stop a start.
                log.exception("the model %s, added earlier, cannot be read", name)
                self._left_out[name] = unexpected(error).message
        for name, spec in [*self.lent.items()]:
            try:
                config = config.with_model(spec)
            except SparkdError as error:
                del self.lent[name]
                log.warning("the model %s of a bench is left out: %s", name, error.message)
        for name, reason in self._left_out.items():
            log.warning("the model %s, added earlier, is left out: %s", name, reason)
        return config


def replaced(registry: Registry, base: Config) -> list[ModelConfig]:
    """The entries with which this configuration of the file would restart READY engines. Changes nothing."""
    entries = [
        (record, base.models.get(name) or (record.spec if record.origin == "api" else None))
        for name, record in registry.records.items()
        if record.state is ModelState.READY
    ]
    return [spec for record, spec in entries if spec is not None and config_hash(spec, base.engine) != record.hash]


def _text(spec: Mapping[str, Any]) -> str:
    """To be compared, as the database keeps it."""
    return json.dumps(dict(spec), sort_keys=True)
