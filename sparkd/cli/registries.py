"""`sparkd recipes`: add-registry, update, remove-registry, and the lists of registries. They need no daemon."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from sparkd.cli.options import Json, argument, option, wants_json
from sparkd.errors import ConfigError, Conflict, SparkdError
from sparkd.render.page import printable, say_json

if TYPE_CHECKING:
    from sparkd.recipes.registry import Registries


def register(recipes: typer.Typer) -> None:
    """The verbs, below `recipes`."""
    recipes.command("add-registry")(add_registry)
    recipes.command("update")(update)
    recipes.command("remove-registry")(remove_registry)


def add_registry(
    ctx: typer.Context,
    source: Annotated[str, argument(metavar="URL|DIR", help="A git repository: an address that git takes, or a folder.")],
    name: Annotated[str | None, option("--name", metavar="NAME", help="Name for the registry; default: the repository's.")] = None,
    json: Json = False,
) -> None:
    """Add a git repository of recipes at its newest commit.

    The repository has eugr's or sparkrun's layout. Its recipes are then called NAME@REGISTRY. sparkd runs nothing of it, and keeps that
    commit until `sparkd recipes update`.
    """
    from sparkd.recipes.registry import NAME

    url = os.path.abspath(os.path.expanduser(source)) if os.path.isdir(os.path.expanduser(source)) else source
    if "://" in url and (urlsplit(url).password is not None or (url.startswith("http") and urlsplit(url).username is not None)):
        raise ConfigError("The address has a user or password in it, which others can read: put them into ~/.netrc, or use ssh.")
    chosen = name or re.sub(r"[^a-z0-9._-]+", "-", url.rstrip("/").rpartition("/")[2].lower().removesuffix(".git")).strip("-._")
    if not NAME.fullmatch(chosen):
        rule = "up to 64 of a-z, 0-9, '.', '_' and '-' are expected, a letter or digit first"
        raise ConfigError(f"--name {printable(chosen)[:64]!r}: {rule}.")
    registries = _registries(writing=True)
    if there := registries.find(chosen):
        raise Conflict(f"The registry {chosen} is there, of {there.url}: `sparkd recipes update {chosen}`, or give another --name.")
    registry = registries.fetch(chosen, url).summary()
    if wants_json(ctx, json):
        say_json({"registry": registry})
        return
    _say(f"{chosen}: {registry['recipes']} recipes at {_commit(registry)}. `sparkd recipes ls --registry {chosen}` lists them.")


def update(
    ctx: typer.Context,
    name: Annotated[str | None, argument(metavar="[NAME]", help="Registry; default: all.")] = None,
    json: Json = False,
) -> None:
    """Update registries to their newest commit.

    A registry that cannot be updated stays as it is.
    """
    registries = _registries(writing=True)
    rows = list[dict[str, Any]]()
    for old in [registries.get(name)] if name is not None else registries.all():
        try:
            rows.append({**registries.fetch(old.name, old.url).summary(), "old_commit": old.commit, "error": None})
        except SparkdError as error:
            rows.append({"name": old.name, "error": error.message})
    if wants_json(ctx, json):
        say_json({"registries": rows})
    else:
        for row in rows:
            if row["error"] is None:
                was = "unchanged" if row["old_commit"] == row["commit"] else f"{row['old_commit'][:12]} ->"
                _say(f"{row['name']}: {was} {_commit(row)}; {row['recipes']} recipes.")
        _say_errors(rows)
        if not rows:
            _say("No registry is configured. `sparkd recipes add-registry URL` adds one.")
    _end(rows)


def remove_registry(
    ctx: typer.Context, name: Annotated[str, argument(metavar="NAME", help="Name of the registry.")], json: Json = False
) -> None:
    """Remove a registry.

    Recipes that were imported from it stay.
    """
    _registries(writing=True).remove(name)
    if wants_json(ctx, json):
        say_json({"removed": name})
    else:
        _say(f"{name} is removed.")


def list_registries(name: str | None, as_json: bool) -> None:
    """`recipes ls --registry [NAME]`: the registries, or the recipes of one."""
    from sparkd.render import models as show
    from sparkd.render import recipes as show_recipes

    registries = _registries()
    if name is not None:
        registry = registries.get(name)
        recipes = list(registry.rows())
        if as_json:
            say_json({"registry": registry.summary(), "recipes": recipes})
            return
        show_recipes.of_registry(recipes, show.terminal())
        _say(f"{registry.url} at {_commit(registry.summary())}.")
        return
    rows = [registry.summary() for registry in registries.all()]
    if as_json:
        say_json({"registries": rows})
    else:
        show_recipes.registries(rows, show.terminal())


def _registries(*, writing: bool = False) -> Registries:
    """The registries of this machine's sparkd. Raises StateError if this is root, and would write into another user's folder."""
    from sparkd.cli.config_file import config_of
    from sparkd.cli.folder_owner import refuse_another_users
    from sparkd.recipes.registry import Registries

    state_dir = config_of(None, os.environ).state_dir
    if writing:
        refuse_another_users(state_dir)
    return Registries(state_dir)


def _commit(registry: dict[str, Any]) -> str:
    return f"{registry['commit'][:12]} of {registry['committed'][:10]}"


def _say(text: str) -> None:
    sys.stdout.write(printable(text) + "\n")


def _say_errors(rows: list[dict[str, Any]]) -> None:
    sys.stdout.flush()
    sys.stderr.writelines(printable(f"error: {row['name']}: {row['error']}") + "\n" for row in rows if row["error"])


def _end(rows: list[dict[str, Any]]) -> None:
    if any(row["error"] for row in rows):
        raise typer.Exit(SparkdError.exit_code)
