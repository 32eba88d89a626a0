"""`sparkd recipes`: add-registry, update, remove-registry, and the lists of registries. They need no daemon. Never uses a recipe."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkd.cli.options import CommonOptions, Json, argument, option
from sparkd.errors import ConfigError, Conflict, SparkdError
from sparkd.render.page import printable, say_json

if TYPE_CHECKING:
    from pathlib import Path

    from sparkd.recipes.registry import Registries

_SIGNED = {
    "good": "signed by {}",
    "untrusted": "signed by {}, with an untrusted key",
    "expired": "signed by {}, with a key that has expired",
    "unknown": "signed, by a key that is not here",
    "none": "not signed",
}


def register(recipes: typer.Typer) -> None:
    """The verbs, below `recipes`."""
    recipes.command("add-registry")(add_registry)
    recipes.command("update")(update)
    recipes.command("remove-registry")(remove_registry)


def add_registry(
    ctx: typer.Context,
    source: Annotated[str, argument(metavar="URL|DIR", help="A git repository: https or ssh address, or a folder.")],
    name: Annotated[str | None, option("--name", metavar="NAME", help="Name for the registry; default: the repository's.")] = None,
    json: Json = False,
) -> None:
    """Add a git repository of recipes at its newest commit.

    The repository has eugr's or sparkrun's layout. Its recipes are then called NAME@REGISTRY. sparkd runs nothing of it, and keeps that
    commit until `sparkd recipes update`.
    """
    from sparkd.cli.registry_fetch import fetched, source_of
    from sparkd.recipes.registry import NAME

    where = source_of(source)
    chosen = where.default_name if name is None else name
    if not NAME.fullmatch(chosen):
        rule = "up to 64 of a-z, 0-9, '.', '_' and '-' are expected, a letter or digit first"
        raise ConfigError(f"--name {printable(chosen)[:64]!r}: {rule}.")

    def add(registries: Registries) -> dict[str, Any]:
        if chosen in registries:
            url_there = registries.get(chosen).url
            raise Conflict(f"The registry {chosen} is there, of {url_there}: `sparkd recipes update {chosen}`, or give another --name.")
        registry = fetched(chosen, where, registries.folder)
        registries.put(registry)
        return registry.summary()

    registry = _on_registries(add)
    if _json(ctx, json):
        say_json({"registry": registry})
        return
    _say(f"{registry['name']}: {_counted(registry['recipes'])} at {_commit(registry)}.")
    _say_left_out(registry)
    _say(f"`sparkd recipes ls --registry {registry['name']}` lists them.")


def update(
    ctx: typer.Context,
    name: Annotated[str | None, argument(metavar="[NAME]", help="Registry; default: all.")] = None,
    json: Json = False,
) -> None:
    """Update registries to their newest commit.

    Prints what changed. A registry that cannot be updated stays as it is.
    """
    from sparkd.cli.registry_fetch import fetched, source_of
    from sparkd.recipes.registry import Change

    def bring(registries: Registries) -> list[dict[str, Any]]:
        rows = list[dict[str, Any]]()
        for each in [registries.get(name).name] if name is not None else registries.names():
            row = _summary(registries, each)
            if row["error"]:
                rows.append(row)
                continue
            old = registries.get(each)
            try:
                new = fetched(each, source_of(old.url), registries.folder)
                registries.put(new)
            except SparkdError as error:
                rows.append(row | {"error": error.message})
                continue
            change = Change.between(old, new)
            names = {key: list(getattr(change, key)) for key in ("added", "changed", "removed")}
            rows.append(new.summary() | {"old_commit": old.commit, "error": None} | names)
        return rows

    rows = _on_registries(bring)
    if _json(ctx, json):
        say_json({"registries": rows})
    else:
        for row in rows:
            _say_update(row)
        if not rows:
            _say("No registry is configured. `sparkd recipes add-registry URL` adds one.")
    if any(row["error"] for row in rows):
        raise typer.Exit(SparkdError.exit_code)


def remove_registry(
    ctx: typer.Context, name: Annotated[str, argument(metavar="NAME", help="Name of the registry.")], json: Json = False
) -> None:
    """Remove a registry.

    Recipes that were imported from it stay.
    """

    def remove(registries: Registries) -> None:
        registries.remove(name)

    _on_registries(remove)
    if _json(ctx, json):
        say_json({"removed": name})
    else:
        _say(f"{name} is removed.")


def list_registries(name: str | None, as_json: bool) -> None:
    """`recipes ls --registry [NAME]`: the registries, or the recipes of one."""
    if name is None:
        rows: list[dict[str, Any]] = _on_registries(lambda registries: [_summary(registries, each) for each in registries.names()])
        usable = [row for row in rows if row["error"] is None]
        if as_json:
            say_json({"registries": rows})
        elif usable or not rows:
            from sparkd.render import models as show
            from sparkd.render import recipes as show_recipes

            show_recipes.registries(({**row, "signed": _signed(row)} for row in usable), show.terminal())
        if len(usable) < len(rows):
            if not as_json:
                for row in rows:
                    _say_error(row)
            raise typer.Exit(SparkdError.exit_code)
        return
    registry, recipes = _on_registries(lambda registries: [registries.get(name).summary(), list(registries.get(name).rows())])
    if as_json:
        say_json({"registry": registry, "recipes": recipes})
        return
    from sparkd.render import models as show
    from sparkd.render import recipes as show_recipes

    show_recipes.of_registry(recipes, show.terminal())
    _say(f"{registry['url']} at {_commit(registry)}.")
    _say_left_out(registry)


def _on_registries(work: Any) -> Any:
    """The result of `work` for the registries of this machine's sparkd."""
    from sparkd.cli.config_file import config_of
    from sparkd.recipes.registry import Registries
    from sparkd.state.folder_owner import refuse_another_users

    state_dir: Path = config_of(None, os.environ).state_dir
    refuse_another_users(state_dir)
    return work(Registries(state_dir))


def _summary(registries: Registries, name: str) -> dict[str, Any]:
    """Where the registry cannot be used: its name and the error alone."""
    try:
        return registries.get(name).summary() | {"error": None}
    except SparkdError as error:
        return {"name": name, "error": error.message}


def _signed(registry: dict[str, Any]) -> str:
    signature = registry["signature"]
    return _SIGNED[signature["state"]].format(signature["signer"] or "somebody")


def _short(commit: str) -> str:
    from sparkd.recipes.registry import SHOWN_COMMIT  # other verbs do without its imports

    return commit[:SHOWN_COMMIT]


def _commit(registry: dict[str, Any]) -> str:
    return f"{_short(registry['commit'])} of {registry['committed'][:10]}, {_signed(registry)}"


def _counted(recipes: int) -> str:
    return f"{recipes} recipe{'' if recipes == 1 else 's'}"


def _say(text: str) -> None:
    sys.stdout.write(printable(text) + "\n")


def _say_left_out(registry: dict[str, Any]) -> None:
    if registry["left_out"]:
        _say("Left out: " + "; ".join(f"{count} ({reason})" for reason, count in registry["left_out"].items()) + ".")
    for name, reason in registry["unreadable"].items():
        _say(f"  {name}@{registry['name']} cannot be read: {reason}")


def _say_error(row: dict[str, Any]) -> None:
    if row["error"]:
        stays = f" stays at {_short(row['commit'])}" if "commit" in row else ""
        sys.stdout.flush()
        sys.stderr.write(printable(f"error: {row['name']}{stays}: {row['error']}") + "\n")


def _say_update(row: dict[str, Any]) -> None:
    if row["error"]:
        _say_error(row)
        return
    if row["old_commit"] == row["commit"]:
        _say(f"{row['name']}: unchanged at {_commit(row)}.")
        return
    _say(f"{row['name']}: {_short(row['old_commit'])} -> {_commit(row)}; {_counted(row['recipes'])}.")
    for key in ("added", "changed", "removed"):
        for each in row[key]:
            _say(f"  {key:<8} {each}@{row['name']}")
    _say_left_out(row)


def _json(ctx: typer.Context, json: bool) -> bool:
    return json or (ctx.find_root().obj or CommonOptions()).json
