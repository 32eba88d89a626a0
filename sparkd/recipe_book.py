"""Owns where recipes lie and how one is found by name: the operator's folder before the ones that come with sparkd. Never runs one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkd.errors import ConfigError
from sparkd.nearest import nearest
from sparkd.yamlfile import Problem

if TYPE_CHECKING:
    from sparkd.recipe_file import RecipeFile

# In a checkout beside the package; where it was installed from one, below the environment's prefix (pyproject.toml, data-files).
_CHECKOUT = Path(__file__).resolve().parent.parent / "configs" / "recipes"
_INSTALLED = Path(sys.prefix) / "share" / "sparkd" / "recipes"
OPERATORS = Path("/etc/sparkd/recipes")
VARIANT = "@"
_SUFFIX = ".yaml"


class AsWritten(Mapping[str, str]):
    """An environment in which ${env.NAME} stands for itself: for showing and checking a recipe, whose values may be secrets."""

    def __getitem__(self, name: str) -> str:
        return "${env." + name + "}"

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class Book:
    """The recipes of some folders; of two with one name the first one counts. A file is read when it is asked for, and once."""

    def __init__(self, own: Path | None, environ: Mapping[str, str]) -> None:
        """own: the operator's folder, None for the usual one. environ: what ${env.NAME} in a recipe stands for."""
        self._folders = (own or OPERATORS, _CHECKOUT if _CHECKOUT.is_dir() else _INSTALLED)
        self._environ = environ
        self._read: dict[Path, tuple[RecipeFile | None, list[Problem]]] = {}
        self._kept: dict[str, RecipeFile] = {}

    def keep(self, file: RecipeFile) -> None:
        """Have a recipe that lies in none of the folders, under its name and before the others."""
        self._kept[file.name] = file

    def names(self) -> dict[str, Path]:
        """Name -> file, in alphabetical order."""
        found: dict[str, Path] = {}
        for folder in self._folders:
            try:
                files = [path for path in folder.iterdir() if path.suffix == _SUFFIX and path.is_file()]
            except OSError:
                continue
            for path in files:
                found.setdefault(path.stem, path)
        return dict(sorted(found.items()))

    def read(self, name: str) -> tuple[RecipeFile | None, list[Problem]]:
        """By name, or by path where it holds a '/'. A name that nobody has is a problem without a place."""
        if name in self._kept:
            return self._kept[name], []
        path = Path(name).expanduser() if "/" in name else self.names().get(name)
        if path is None:
            near = nearest(name, self.names())
            hint = f"did you mean {near}? `sparkd recipes ls` lists them" if near else "`sparkd recipes ls` lists them"
            return None, [Problem(None, None, f"{name[:64]!r} is no recipe: {hint}.")]
        if path not in self._read:
            from sparkd.recipe_file import read_recipe

            self._read[path] = read_recipe(path, self._environ)
        return self._read[path]

    def find(self, name: str) -> RecipeFile:
        """As `read`; raises ConfigError with the first problems."""
        file, problems = self.read(split(name)[0])
        if file is None:
            raise ConfigError("\n".join(str(problem) for problem in problems[:5]), param="recipe")
        return file

    def settings(self, name: str | None) -> dict[str, Any]:
        """The keys of a model that NAME or NAME@VARIANT sets; empty for no recipe. Raises as `find`."""
        if name is None:
            return {}
        return {key: value for table in self.find(name).settings(split(name)[1]) for key, value in table.items()}


def split(name: str) -> tuple[str, str | None]:
    """`qwen@long` -> the recipe qwen, its variant long."""
    recipe, at, variant = name.partition(VARIANT)
    return recipe, variant if at else None
