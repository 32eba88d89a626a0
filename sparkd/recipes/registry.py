"""The registries of recipes on this machine: the recipes of each at its commit, and what such a recipe may set."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkd.errors import ConfigError, StateError
from sparkd.nearest import nearest
from sparkd.recipes.admin_policy import refuse_more_than_tuning
from sparkd.state.documents import Documents
from sparkd.state.rows import noun_of
from workers.host.hub_cache import is_hub_id
from workers.host.private_files import private_folder

if TYPE_CHECKING:
    from sparkd.recipes.file import RecipeFile

SHOWN_COMMIT = 12
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
# A pattern instead of a YAML parser, so that a list of hundreds of recipes is fast.
_LINE = r"^{key}[ \t]*:[ \t]*(?:\"([^\"\n]*)\"|'([^'\n]*)'|([^#\n]*))"
_COLUMNS = {key: re.compile(_LINE.format(key=key), re.MULTILINE) for key in ("model", "runtime")}
_SHOWN_CHARS = 160
_TRUST = "trust_remote_code"
# They let a stranger's code in, take the requests for other models, or keep other models from the memory.
_OF_THE_ENTRY = (_TRUST, "served_model_name", "default", "pin")
_WHERE = "in a recipe of a registry that is used by its name"


@dataclass(frozen=True, slots=True)
class Registry:
    """One registry. committed: ISO 8601. recipes: name -> the file's text at `commit`."""

    name: str
    url: str
    commit: str
    committed: str
    recipes: Mapping[str, str]

    def text(self, name: str) -> tuple[str, str]:
        """(full name, text) of a recipe: by its path below the registry's folder, or by its last part where only one has that.

        Raises ConfigError.
        """
        matches = [name] if name in self.recipes else [full for full in self.recipes if full.rpartition("/")[2] == name]
        if len(matches) == 1:
            return matches[0], self.recipes[matches[0]]
        if matches:
            raise ConfigError(f"{name}@{self.name} may be any of {', '.join(matches[:6])}: give the whole name.")
        near = nearest(name, list(self.recipes))
        hint = f"did you mean {near}@{self.name}? " if near else ""
        raise ConfigError(
            f"{name[:64]!r} is not a recipe of the registry {self.name}: {hint}`sparkd recipes ls --registry {self.name}` lists them."
        )

    @property
    def origin(self) -> str:
        """The source of the registry's recipes: address and commit."""
        return f"{self.url} at {self.commit}"

    def rows(self) -> Iterator[dict[str, str | None]]:
        """name, model and runtime of each recipe as its file writes them; None for what it does not say on one line."""
        for name, text in sorted(self.recipes.items()):
            yield {"name": f"{name}@{self.name}", **{key: _written(pattern, text) for key, pattern in _COLUMNS.items()}}

    def summary(self) -> dict[str, Any]:
        """The registry's fields, with the number of recipes in place of their texts."""
        return asdict(self) | {"recipes": len(self.recipes)}


class Registries:
    """The registries in state.db. Each is read once. Its methods raise StateError where the database cannot be used."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._kept = Documents(state_dir, "registries", partial(noun_of, Registry))
        self._read: dict[str, Registry] = {}

    def all(self) -> list[Registry]:
        """By name."""
        return [*self._kept.all().values()]

    def find(self, name: str) -> Registry | None:
        if name not in self._read and (registry := self._kept.get(name)):
            self._read[name] = registry
        return self._read.get(name)

    def get(self, name: str) -> Registry:
        """The registry of this name. Raises ConfigError for an unknown name."""
        if registry := self.find(name):
            return registry
        names = [registry.name for registry in self.all()]
        near = nearest(name, names)
        known = f"{f'did you mean {near}? ' if near else ''}known: {', '.join(names) or 'none'}"
        raise ConfigError(f"{name[:64]!r} is not a registry; {known}. `sparkd recipes add-registry URL` adds one.")

    def fetch(self, name: str, url: str) -> Registry:
        """Keep the repository's recipes at its newest commit under `name`. Raises SparkdError, and then keeps what was there."""
        from sparkd.recipes.clone import cloned  # the daemon fetches nothing

        try:
            private_folder(self._state_dir)
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=self._state_dir) as scratch:
                registry = Registry(name, url, *cloned(url, Path(scratch)))
        except OSError as error:
            raise StateError(f"{self._state_dir}: {error.strerror}. Run this as the user that sparkd runs as.") from None
        self._kept.put(name, asdict(registry))
        self._read[name] = registry
        return registry

    def remove(self, name: str) -> None:
        """Remove the registry of this name. Raises ConfigError for an unknown name."""
        self._kept.remove(self.get(name).name)


def refuse_untrusted(file: RecipeFile, text: str) -> None:
    """Raise ConfigError for the first key, flag or variable of a recipe that does more than tune a model.

    Hostile side: whoever can write to the registry. Such a recipe must not load code, read a variable of this machine's environment, or
    name files, addresses or other repositories. The lists are those for models that are added over the admin API.

    text: the recipe's text.
    """
    cure = f"`sparkd recipes import {file.name} --to FILE`, read that file, and use it."
    if path := next((name for name in file.repositories() if not is_hub_id(name)), None):
        raise ConfigError(f"{path[:64]!r} is a folder of this machine, which is refused {_WHERE}: {cure}", file=file.name)
    if "${env." in text:
        raise ConfigError(f"a value from this machine's environment is refused {_WHERE}: {cure}", file=file.name)
    try:
        refuse_more_than_tuning({key: value for key, value in file.settings.items() if key != _TRUST}, _WHERE, cure)
    except ConfigError as error:
        raise ConfigError(error.message, file=file.name, param=error.param) from None


def take_out_of_the_entry(file: RecipeFile) -> list[str]:
    """Remove the keys that only the entry of a model may set. Returns those that the recipe had."""
    return [key for key in _OF_THE_ENTRY if file.settings.pop(key, None)]


def _written(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    value = next((group.strip() for group in match.groups() if group), "") if match else ""
    return " ".join(value.split())[:_SHOWN_CHARS] or None
