"""`sparkd recipes`: ls, show, check, import. They need no daemon."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkd.cli import registries
from sparkd.cli.options import DefaultVerb, argument, group, key_values, option
from sparkd.cli.session import Session, verb
from sparkd.errors import ConfigError, EngineError
from sparkd.render.page import printable, say_json, verdict
from workers.host import regular_file

if TYPE_CHECKING:
    from sparkd.config.yaml_file import ConfigProblem
    from sparkd.recipes.library import RecipeLibrary
    from sparkd.vllm.arg_check import RefusedArg


Name = Annotated[str, argument(metavar="NAME", help="A recipe, or NAME@REGISTRY.")]


def register(app: typer.Typer) -> None:
    recipes = group("recipes", cls=DefaultVerb, help="List, show, check and import recipes of models.")
    for name, command in (("ls", ls), ("show", show_), ("check", check), ("import", import_)):
        recipes.command(name)(verb(command, daemon=False))
    registries.register(recipes)
    app.add_typer(recipes)


def ls(
    session: Session,
    name: Annotated[str | None, argument(metavar="[NAME]", help="With --registry: list the recipes of this registry.")] = None,
    registry: Annotated[bool, option("--registry", help="List the registries, or the recipes of NAME.")] = False,
) -> None:
    """List all recipes with their model and measured rate."""
    if registry:
        registries.list_registries(session, name)
        return
    if name is not None:
        raise ConfigError(f"{name[:64]!r}: `recipes ls` takes a name with --registry alone; `sparkd recipes show NAME` shows one recipe.")
    from sparkd.config.recipe_check import summary

    book = _book()
    rows, wrong = [], list[Any]()
    for name in book.names():
        file, problems = book.read(name)
        wrong += problems
        if file is not None:
            rows.append(summary(file))
    from sparkd.render import recipes as show_recipes

    value = {"recipes": rows, "problems": [problem.to_json() for problem in wrong]}
    session.answer(value, lambda: show_recipes.listed(rows, session.out))
    for problem in () if session.json else wrong:
        sys.stderr.write(f"{printable(str(problem))}\n")


def show_(
    session: Session,
    name: Name,
) -> None:
    """Show one recipe: settings, flags, figures and sources."""
    from sparkd.config.parser_choice import explained
    from sparkd.config.recipe_check import described, resolve

    book = _book()
    file = book.find(name)
    spec = resolve(name, book)
    env = {name: value.get_secret_value() for name, value in spec.env.items()}
    description = described(file, spec) | {"parsers": explained(spec, env, book.settings(name))}
    from sparkd.render import recipes as show_recipes

    session.answer(description, lambda: show_recipes.described(description, session.out))
    if not session.json:
        sys.stderr.writelines(f"{printable(str(problem))}\n" for problem in book.read(name)[1])


def check(
    session: Session,
    files: Annotated[list[Path] | None, argument(metavar="[FILE]...", help="Recipes, also eugr's or sparkrun's; default: all.")] = None,
) -> None:
    """Check recipes.

    Prints `file:line: message` for each problem. Exits with 2 if a recipe cannot be used.
    """
    from sparkd.config.recipe_check import checked, load
    from sparkd.recipes.library import AsWritten

    book = _book()
    problems: list[ConfigProblem] = []
    paths = files or list(book.names().values())
    for path in paths:
        file, wrong = load(path, AsWritten(), _parser)
        problems += wrong
        if file is not None:
            book.keep(file)
            problems += checked(file, book)
    wrong = [problem for problem in problems if problem.severity == "error"]
    summary = f"{len(paths)} recipe{'s' if len(paths) != 1 else ''}: {verdict(len(wrong), len(problems) - len(wrong))}"
    value = {"ok": not wrong, "recipes": len(paths), "problems": [problem.to_json() for problem in problems]}
    session.answer(value, "\n".join([*map(str, problems), summary]))
    if wrong:
        raise typer.Exit(ConfigError.exit_code)


def import_(
    session: Session,
    file: Annotated[Path, argument(metavar="FILE", help="A recipe of eugr's or sparkrun's, or NAME@REGISTRY.")],
    settings: Annotated[list[str] | None, option("-o", metavar="KEY=VALUE", help="Replace one of the recipe's defaults.")] = None,
    to: Annotated[Path | None, option("--to", metavar="FILE", help="Write the recipe to FILE instead of stdout.")] = None,
) -> None:
    """Convert another launcher's recipe to one of sparkd's.

    Prints risks first (code that the recipe trusts, folders that it names), then what is missing, then what was left out, on stderr and at
    the head of the recipe. Shell hooks are always left out. A recipe that cannot be used is not written, and the exit code is 2.
    """
    from sparkd.config.recipe_check import validated
    from sparkd.config.yaml_file import parse
    from sparkd.recipes.file import is_foreign
    from sparkd.recipes.importer import Imported, imported
    from sparkd.recipes.library import AsWritten

    raw, shown, origin = _raw(file)
    document = parse(raw, shown, AsWritten())
    if origin and not document.problems and not is_foreign(document.values):
        converted = Imported({}, raw.decode(), ())
    else:
        converted = imported(raw, shown, key_values(settings or [], "max_model_len=8192"), _parser, origin)
    recipe = (to or file).stem.partition("@")[0]
    converted, problems = validated(converted, recipe, f"{file} (imported)")
    if origin:
        converted = replace(converted, text=f"# {origin}.\n{converted.text}")
    if to is not None and not problems:
        try:
            with to.open("x", encoding="utf-8") as out:
                out.write(converted.text)
        except OSError as error:
            raise ConfigError(f"{to}: it cannot be written: {error.strerror}. Give a new file in an existing folder.") from None
    if session.json:
        rows = [problem.to_json() for problem in problems]
        remarks = {key: list(getattr(converted, key)) for key in ("risks", "missing", "notes")}
        say_json({"recipe": converted.recipe, "text": converted.text, **remarks, "problems": rows})
    else:
        if to is None and not problems:
            sys.stdout.write(converted.text)
        sys.stdout.flush()
        for kind, lines in (("risk", converted.risks), ("missing", converted.missing)):
            sys.stderr.writelines(f"{kind}: {printable(line)}\n" for line in lines)
            sys.stderr.write("\n" if lines else "")
        sys.stderr.writelines(f"{printable(line)}\n" for line in (*converted.notes, *map(str, problems)))
        if problems:
            sys.stderr.write(f"{file}: the converted recipe cannot be used here, so nothing was written.\n")
    if problems:
        raise typer.Exit(ConfigError.exit_code)


def _parser(args: Sequence[str], env: Mapping[str, str]) -> tuple[str, Sequence[RefusedArg]] | None:
    """(version, refused arguments) of the vLLM in sparkd's own environment; None where it gives no answer. Takes as long as its import."""
    from sparkd.cli.config_file import config_of
    from sparkd.vllm.arg_check import ANOTHER_PARSER
    from sparkd.vllm.ask.cache import places
    from sparkd.vllm.ask.parser import announce, answers
    from sparkd.vllm.installed import full_version_in

    if any(name in env for name in ANOTHER_PARSER):
        return None
    try:
        (refusals,) = answers([args], None, places(config_of(None, os.environ).state_dir), ask=True, first=announce)
    except EngineError:
        return None
    return None if refusals is None else (full_version_in(None) or "", refusals)


def _book() -> RecipeLibrary:
    from sparkd.cli.config_file import config_of
    from sparkd.recipes.library import AsWritten, RecipeLibrary

    config = config_of(None, os.environ)
    return RecipeLibrary(config.recipes_dir, AsWritten(), config.state_dir)


def _raw(file: Path) -> tuple[bytes, str, str]:
    """(content, name in messages, address and commit) of a recipe of a registry, or of a file, which has no such."""
    from sparkd.checkpoint.source import FOLDER_SIGNS
    from sparkd.recipes.file import SUFFIXES

    name = str(file)
    if not file.exists() and file.suffix not in SUFFIXES and not name.startswith(FOLDER_SIGNS):
        book = _book()
        if name in book.names():
            raise ConfigError(f"{name} is a recipe of sparkd's already: name it in an entry (`recipe: {name}`), or import NAME@REGISTRY.")
        if "@" in name:
            registry, full, text = book.registry_text(name)
            return text.encode(), f"{full}@{registry.name}", registry.origin
    try:
        return regular_file.read(file), name, ""
    except OSError as error:
        raise ConfigError(f"{file}: it cannot be read: {error.strerror}. Give the path of a recipe, or NAME@REGISTRY.") from None
