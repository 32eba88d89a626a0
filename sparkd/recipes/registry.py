"""Owns the registries of recipes on this machine: the content of each at its commit, and the changes of a newer commit. Never fetches one.

sparkd keeps a registry as one text file, so that no published file lies where a path could lead to it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkd.errors import ConfigError, StateError
from sparkd.nearest import nearest
from sparkd.recipes.admin_flags import refuse_flags, refuse_variables
from sparkd.recipes.admin_policy import KEYS, LOAD_FORMATS
from workers.host.hub_cache import is_hub_id
from workers.host.private_files import private_folder, write_private

if TYPE_CHECKING:
    from sparkd.recipes.file import RecipeFile

FOLDER = "registries"
SHOWN_COMMIT = 12
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_SUFFIX = ".json"
_SHOWN_MATCHES = 6
# A pattern instead of a YAML parser: a list of hundreds of recipes is fast, and a broken recipe cannot spoil it.
_LINE = r"^{key}[ \t]*:[ \t]*(?:\"([^\"\n]*)\"|'([^'\n]*)'|([^#\n]*))"
_COLUMNS = {key: re.compile(_LINE.format(key=key), re.MULTILINE) for key in ("model", "runtime", "description", "name")}
_SHOWN_CHARS = 160
_TRUST = "trust_remote_code"
_IN_THE_MODEL = re.compile(r"\{model\}(?:/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
_WHERE = "in a recipe of a registry that is used by its name"


@dataclass(frozen=True, slots=True)
class CommitSignature:
    """A commit's signature, as git judges it. state: good, untrusted (good, by a key that this machine does not trust), expired, unknown
    (no key to check it with) or none. signer: the name in the key; empty where nothing was checked."""

    state: str
    signer: str = ""


@dataclass(frozen=True, slots=True)
class Registry:
    """One registry. recipes: name -> the file's text at `commit`. committed: ISO 8601. left_out: reason -> number of files. unreadable:
    name
    -> why the file is no YAML; such a file is not in `recipes`."""

    name: str
    url: str
    commit: str
    committed: str
    signature: CommitSignature
    recipes: Mapping[str, str]
    left_out: Mapping[str, int]
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def text(self, name: str) -> tuple[str, str]:
        """(full name, text) of a recipe: by its path below the registry's folder, or by its last part where only one has that.

        Raises ConfigError.
        """
        if name in self.recipes:
            return name, self.recipes[name]
        matches = [full for full in self.recipes if full.rpartition("/")[2] == name]
        if len(matches) == 1:
            return matches[0], self.recipes[matches[0]]
        if matches:
            several = ", ".join(matches[:_SHOWN_MATCHES])
            raise ConfigError(f"{name}@{self.name} may be any of {several}: give the whole name, such as {matches[0]}@{self.name}.")
        if broken := next((full for full in self.unreadable if name in (full, full.rpartition("/")[2])), None):
            cure = f"Fix it there, then `sparkd recipes update {self.name}`."
            raise ConfigError(f"{broken}@{self.name} cannot be read: {self.unreadable[broken]} {cure}")
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
        """name, model, runtime and description of each recipe as its file writes them; None for what it does not say on one line."""
        for name, text in sorted(self.recipes.items()):
            columns = {key: _written(pattern, text) for key, pattern in _COLUMNS.items()}
            yield {
                "name": f"{name}@{self.name}",
                "model": columns["model"],
                "runtime": columns["runtime"],
                "description": columns["description"] or columns["name"],
            }

    def summary(self) -> dict[str, Any]:
        """The registry's fields, with the number of recipes in place of their texts."""
        return asdict(self) | {"recipes": len(self.recipes)}


@dataclass(frozen=True, slots=True)
class Change:
    """The changes of an update, as names of recipes in alphabetical order."""

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]

    @classmethod
    def between(cls, old: Registry, new: Registry) -> Change:
        both = sorted(old.recipes.keys() & new.recipes.keys())
        before, after = ({*each.recipes, *each.unreadable} for each in (old, new))
        return cls(
            tuple(sorted(new.recipes.keys() - old.recipes.keys())),
            tuple(name for name in both if old.recipes[name] != new.recipes[name]),
            tuple(sorted(before - after)),
        )


class Registries:
    """The registries below the state folder. Each is read once, when it is needed."""

    def __init__(self, state_dir: Path) -> None:
        self.folder = state_dir / FOLDER
        self._read: dict[str, Registry] = {}

    def names(self) -> list[str]:
        """The names of all registries. Raises StateError where the folder cannot be read."""
        try:
            return sorted(path.stem for path in self.folder.iterdir() if path.suffix == _SUFFIX and NAME.fullmatch(path.stem))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StateError(f"{self.folder}: {error.strerror}. Run this as the user that sparkd runs as.") from None

    def __contains__(self, name: object) -> bool:
        # A folder that this user may not read counts as empty: unlike Path.is_file, `isfile` does not raise.
        return isinstance(name, str) and NAME.fullmatch(name) is not None and os.path.isfile(self._path(name))

    def get(self, name: str) -> Registry:
        """The registry of this name. Raises ConfigError for an unknown name, StateError for a file that cannot be used."""
        if name not in self:
            raise ConfigError(f"{name[:64]!r} is not a registry; {self.known(name)}. `sparkd recipes add-registry URL` adds one.")
        if name not in self._read:
            path = self._path(name)
            try:
                self._read[name] = _registry(name, json.loads(path.read_text("utf-8")))
            except OSError as error:
                raise StateError(f"{path}: {error.strerror}. Run this as the user that sparkd runs as.") from None
            except (ValueError, TypeError, KeyError, RecursionError):
                raise StateError(f"{path} is damaged: `sparkd recipes remove-registry {name}`, then add it again.") from None
        return self._read[name]

    def known(self, name: str) -> str:
        """A part of a message: the registry most similar to `name`, and all registries. Raises StateError."""
        names = self.names()
        near = nearest(name, names)
        return f"{f'did you mean {near}? ' if near else ''}known: {', '.join(names) or 'none'}"

    def put(self, registry: Registry) -> None:
        """Keep a registry, replacing one of the same name. Raises StateError."""
        try:
            private_folder(self.folder)
            write_private(self._path(registry.name), json.dumps(asdict(registry), ensure_ascii=True))
        except OSError as error:
            raise StateError(f"{self.folder}: {error.strerror}. Run this as the user that sparkd runs as.") from None
        self._read[registry.name] = registry

    def remove(self, name: str) -> None:
        """Remove the registry of this name. Raises ConfigError for an unknown name, StateError where its file cannot be removed."""
        if name not in self:
            self.get(name)
        try:
            self._path(name).unlink()
        except OSError as error:
            raise StateError(f"{self._path(name)}: {error.strerror}. Run this as the user that sparkd runs as.") from None

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{_SUFFIX}"


def refuse_more_than_tuning(file: RecipeFile, text: str) -> None:
    """Raise ConfigError for the first key, flag or variable of a recipe that does more than tune a model: it loads code, reads a variable
    of this machine's environment, or names files, addresses or other repositories. text: the recipe's text.

    The lists are those for models that are added over the admin API.
    """
    cure = f"`sparkd recipes import {file.name} --to FILE`, read that file, and use it."
    if path := next((name for name in file.repositories() if not is_of_hub(name)), None):
        raise ConfigError(f"{path[:64]!r} is a folder of this machine, which is refused {_WHERE}: {cure}", file=file.name)
    if "${env." in text:
        raise ConfigError(f"a value from this machine's environment is refused {_WHERE}: {cure}", file=file.name)
    for table in file.every_settings():
        for key, value in table.items():
            if key not in KEYS and key != _TRUST and value not in (None, False):
                raise ConfigError(f"{key} is refused {_WHERE}: {cure}", file=file.name, param=key)
        if table.get("load_format") is not None and str(table["load_format"]) not in LOAD_FORMATS:
            raise ConfigError(f"this load_format is refused {_WHERE}: {cure}", file=file.name, param="load_format")
        # The validation of the entry refuses a value of another type.
        args, env = (value if isinstance(value, Mapping | list | tuple) else () for value in (table.get("extra_args"), table.get("env")))
        try:
            refuse_flags([str(arg) for arg in args], where=_WHERE, cure=cure)
            refuse_variables(env if isinstance(env, Mapping) else [str(pair).partition("=")[0] for pair in env], where=_WHERE, cure=cure)
        except ConfigError as error:
            raise ConfigError(error.message, file=file.name, param=error.param) from None


def is_of_hub(name: str) -> bool:
    """Whether a model or a draft is a hub id or a path in the model's own folder, and no other path."""
    return is_hub_id(name) or _IN_THE_MODEL.fullmatch(name) is not None


def take_out_trust(file: RecipeFile) -> bool:
    """Remove the recipe's trust in code of the model's repository; True where it had any. Only the entry may grant that trust."""
    tables = [*file.settings(None), *(table for name in file.recipe.variants for table in file.settings(name))]
    taken = [table.pop(_TRUST, None) for table in tables]
    return any(taken)


def _registry(name: str, table: Mapping[str, Any]) -> Registry:
    """The registry in a table of `put`. Raises TypeError, KeyError or ValueError for any other table."""
    # A registry that an earlier release kept has no `unreadable`.
    recipes, left_out, unreadable = dict(table["recipes"]), dict(table["left_out"]), dict(table.get("unreadable", {}))
    url, commit, committed = (str(table[key]) for key in ("url", "commit", "committed"))
    if not all(isinstance(text, str) for text in recipes.values()):
        raise ValueError("a recipe is text")
    return Registry(name, url, commit, committed, CommitSignature(**table["signature"]), recipes, left_out, unreadable)


def _written(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    value = next((group.strip() for group in match.groups() if group), "") if match else ""
    return " ".join(value.split())[:_SHOWN_CHARS] or None
