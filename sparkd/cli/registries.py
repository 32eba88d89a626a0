"""`sparkd recipes`: add-registry, update, remove-registry, and the lists of registries. They need no daemon."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from sparkd.cli.options import argument, option
from sparkd.cli.session import Session, verb
from sparkd.errors import ConfigError, Conflict, SparkdError
from sparkd.render import models as show
from sparkd.render.page import printable

if TYPE_CHECKING:
    from sparkd.recipes.registry import Registries


def register(recipes: typer.Typer) -> None:
    """The verbs, below `recipes`."""
    for name, command in (("add-registry", add_registry), ("update", update), ("remove-registry", remove_registry)):
        recipes.command(name)(verb(command, daemon=False))


def add_registry(
    session: Session,
    source: Annotated[str, argument(metavar="URL|DIR", help="A git repository: an address that git takes, or a folder.")],
    name: Annotated[str | None, option("--name", metavar="NAME", help="Name for the registry; default: the repository's.")] = None,
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
    text = f"{chosen}: {registry['recipes']} recipes at {_commit(registry)}. `sparkd recipes ls --registry {chosen}` lists them."
    session.answer({"registry": registry}, text)


def update(
    session: Session,
    name: Annotated[str | None, argument(metavar="[NAME]", help="Registry; default: all.")] = None,
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
    lines, failed = list[str](), list[str]()
    for row in rows:
        if row["error"] is None:
            was = "unchanged" if row["old_commit"] == row["commit"] else f"{row['old_commit'][:12]} ->"
            lines.append(f"{row['name']}: {was} {_commit(row)}; {row['recipes']} recipes.")
        else:
            failed.append(f"error: {row['name']}: {row['error']}")
    none = "No registry is configured. `sparkd recipes add-registry URL` adds one."
    session.answer({"registries": rows}, "\n".join(lines) if rows else none)
    if failed and not session.json:
        show.say(session.err, "\n".join(failed))
    if failed:
        raise typer.Exit(SparkdError.exit_code)


def remove_registry(session: Session, name: Annotated[str, argument(metavar="NAME", help="Name of the registry.")]) -> None:
    """Remove a registry.

    Recipes that were imported from it stay.
    """
    _registries(writing=True).remove(name)
    session.answer({"removed": name}, f"{name} is removed.")


def list_registries(session: Session, name: str | None) -> None:
    """`recipes ls --registry [NAME]`: the registries, or the recipes of one."""
    from sparkd.render import recipes as show_recipes

    registries = _registries()
    if name is None:
        rows = [registry.summary() for registry in registries.all()]
        session.answer({"registries": rows}, lambda: show_recipes.registries(rows, session.out))
        return
    registry = registries.get(name)
    recipes = list(registry.rows())
    session.answer(
        {"registry": registry.summary(), "recipes": recipes}, lambda: show_recipes.of_registry(recipes, registry.summary(), session.out)
    )


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
