"""Finds recipes by name: in the operator's folder, then among sparkd's own, and as NAME@REGISTRY in the registries."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkd.checkpoint.source import FOLDER_SIGNS
from sparkd.config.yaml_file import ConfigProblem, Map, parse
from sparkd.errors import ConfigError, SparkdError
from sparkd.nearest import nearest

if TYPE_CHECKING:
    from sparkd.recipes.file import RecipeFile
    from sparkd.recipes.registry import Registries, Registry

# sparkd's own recipes: beside the package in a checkout, below the environment's prefix after an installation (pyproject.toml, data-files).
_CHECKOUT = Path(__file__).resolve().parents[2] / "configs" / "recipes"
_INSTALLED = Path(sys.prefix) / "share" / "sparkd" / "recipes"
OPERATORS = Path("/etc/sparkd/recipes")
AT = "@"
_LEFT_OUT = "{} is left out: a model that needs it sets it in its own entry."
_SUFFIX = ".yaml"


class AsWritten(dict[str, str]):
    """An environment in which ${env.NAME} stands for itself: for showing and checking a recipe, whose values may be secrets."""

    def __missing__(self, name: str) -> str:
        return "${env." + name + "}"


class RecipeLibrary:
    """The recipes of several folders; the first folder wins for a name. A file is read once, when its recipe is needed."""

    def __init__(self, own: Path | None, environ: Mapping[str, str], state_dir: Path | None = None) -> None:
        """own: the operator's folder, None for the usual one.
        environ: values for ${env.NAME} in recipes.
        state_dir: the folder that holds the registries, None for no registries.
        """
        self._folders = (own or OPERATORS, _CHECKOUT if _CHECKOUT.is_dir() else _INSTALLED)
        self._environ = environ
        self._state_dir = state_dir
        self._read: dict[str, tuple[RecipeFile | None, list[ConfigProblem]]] = {}
        self._kept: dict[str, RecipeFile] = {}

    def keep(self, file: RecipeFile) -> None:
        """Add a recipe that is in none of the folders. It precedes the others under its name."""
        self._kept[file.name] = file

    def names(self) -> dict[str, Path]:
        """Name -> file, in alphabetical order."""
        paths: dict[str, Path] = {}
        for folder in self._folders:
            try:
                files = [path for path in folder.iterdir() if path.suffix == _SUFFIX and path.is_file()]
            except OSError:
                continue
            for path in files:
                paths.setdefault(path.stem, path)
        return dict(sorted(paths.items()))

    def has(self, name: str) -> bool:
        """Whether a recipe is meant by this name, be it in an unknown registry. Looks at no path."""
        if name.partition(AT)[0] in self.names():
            return True
        try:
            self.registry_text(name)
        except SparkdError:
            return False
        return True

    def registry_text(self, recipe: str) -> tuple[Registry, str, str]:
        """(registry, name, text) of RECIPE@REGISTRY, the name in full. Raises ConfigError and StateError."""
        name, _, registry = recipe.partition(AT)
        if self._registries is None:
            raise ConfigError(f"{recipe[:64]!r} is not a recipe here: only a configuration has registries.")
        holder = self._registries.get(registry)
        return holder, *holder.text(name)

    def read(self, name: str) -> tuple[RecipeFile | None, list[ConfigProblem]]:
        """The recipe of a name, or of a path. An unknown name yields a problem without a place."""
        if name in self._kept:
            return self._kept[name], []
        if name not in self._read:
            self._read[name] = self._found(name)
        return self._read[name]

    def find(self, name: str) -> RecipeFile:
        """The recipe of a name or path, like `read`. Raises ConfigError with the first problems."""
        file, problems = self.read(name)
        if file is None:
            raise ConfigError("\n".join(str(problem) for problem in problems[:5]), param="recipe")
        return file

    def settings(self, name: str | None) -> dict[str, Any]:
        """The entry keys that a recipe sets; empty for None. Raises like `find`."""
        from sparkd.config.engine_flags import with_flags_as_keys

        return {} if name is None else with_flags_as_keys(Map(self.find(name).settings))[0]

    def _found(self, name: str) -> tuple[RecipeFile | None, list[ConfigProblem]]:
        from sparkd.recipes.file import read_recipe

        if AT in name and not name.startswith(FOLDER_SIGNS):
            return self._of_registry(name)
        path = Path(name).expanduser() if "/" in name else self.names().get(name)
        if path is None:
            near = nearest(name, self.names())
            hint = f"did you mean {near}? `sparkd recipes ls` lists them" if near else "`sparkd recipes ls` lists them"
            return None, [ConfigProblem(None, None, f"{name[:64]!r} is not a recipe: {hint}.")]
        return read_recipe(path, self._environ)

    @cached_property
    def _registries(self) -> Registries | None:
        """The registries; None without a state folder. Imported only for a name with an '@', which is rare."""
        if self._state_dir is None:
            return None
        from sparkd.recipes.registry import Registries

        return Registries(self._state_dir)

    def _of_registry(self, recipe: str) -> tuple[RecipeFile | None, list[ConfigProblem]]:
        """Like `read`, for a recipe of a registry. Losses of an import are warnings. Such a recipe may only tune a model; where it is only
        shown, more is a warning instead of an error."""
        from sparkd.recipes.file import is_foreign, parse_recipe
        from sparkd.recipes.importer import imported
        from sparkd.recipes.registry import SHOWN_COMMIT, refuse_untrusted, take_out_of_the_entry

        notes: tuple[str, ...] = ()
        try:
            registry, name, text = self.registry_text(recipe)
            full = f"{name}{AT}{registry.name}"
            shown = f"{full} ({registry.commit[:SHOWN_COMMIT]})"
            if is_foreign(parse(text.encode(), shown, {}).values):
                converted = imported(text.encode(), shown, origin=registry.origin)
                text, notes = converted.text, (*converted.missing, *converted.notes)
            file, problems = parse_recipe(full, text.encode(), shown, AsWritten())
            try:
                if file is not None:
                    refuse_untrusted(file, text)
            except ConfigError as error:
                if not isinstance(self._environ, AsWritten):
                    raise
                notes = (error.explanation, *notes)
            if file is not None:
                notes += tuple(map(_LEFT_OUT.format, take_out_of_the_entry(file)))
        except SparkdError as error:
            return None, [ConfigProblem(None, None, error.message)]
        return file, [*(ConfigProblem(shown, None, note, "warning") for note in notes), *problems]
