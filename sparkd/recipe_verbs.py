"""`sparkd recipes`: ls, show, check, import. They need no daemon. Never starts a model."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkd.errors import ConfigError
from sparkd.page import say_json
from sparkd.verb_options import Asked, Json, argument, option

if TYPE_CHECKING:
    from sparkd.recipe_book import Book
    from sparkd.vllm_history import Release
    from sparkd.yamlfile import Problem

recipes = typer.Typer(
    name="recipes",
    help="List, show, check and import recipes of models.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

Folder = Annotated[Path | None, option("--dir", metavar="DIR", help="Your recipes; default recipes_dir of sparkd.yaml.")]
Version = Annotated[str | None, option("--vllm", metavar="VERSION", help="For this release; default the one beside sparkd.")]
Profile = Annotated[str | None, option("--profile", metavar="NAME", help="single-user, balanced or throughput.")]
Speculative = Annotated[str | None, option("--speculative", metavar="HOW", help="off, ngram, suffix, mtp or dflash.")]
Name = Annotated[str, argument(metavar="NAME", help="A recipe, or NAME@VARIANT.")]


def register(app: typer.Typer) -> None:
    app.add_typer(recipes)


@recipes.command("ls")
def ls(ctx: typer.Context, folder: Folder = None, json: Json = False) -> None:
    """Every recipe: the model, and how fast it has been seen."""
    from sparkd.recipe_check import summary

    book = _book(folder)
    rows, wrong = [], list[Any]()
    for name in book.names():
        file, problems = book.read(name)
        wrong += problems
        if file is not None:
            rows.append(summary(file))
    if _json(ctx, json):
        say_json({"recipes": rows, "problems": [_problem(problem) for problem in wrong]})
        return
    from sparkd import show, show_recipes

    show_recipes.listed(rows, show.terminal())
    for problem in wrong:
        sys.stderr.write(f"{problem}\n")


@recipes.command("show")
def show_(
    ctx: typer.Context,
    name: Name,
    profile: Profile = None,
    speculative: Speculative = None,
    vllm: Version = None,
    folder: Folder = None,
    json: Json = False,
) -> None:
    """One recipe: what it sets, the flags it comes to, figures and their sources."""
    from sparkd.parser_choice import explained
    from sparkd.recipe_book import split
    from sparkd.recipe_check import Choice, described, resolve

    book = _book(folder)
    recipe, variant = split(name)
    file = book.find(recipe)
    found = resolve(Choice(recipe, variant, profile, speculative), book, _release(vllm))  # type: ignore[arg-type]
    spec = found.model
    env = {name: value.get_secret_value() for name, value in spec.env.items()}
    told = described(file, found) | {"parsers": explained(spec, env, spec.runtime, book.settings(name))}
    if _json(ctx, json):
        say_json(told)
    else:
        from sparkd import show, show_recipes

        show_recipes.described(told, show.terminal())


@recipes.command("check")
def check(
    ctx: typer.Context,
    files: Annotated[list[Path] | None, argument(metavar="[FILE]...", help="Recipes, also eugr's and sparkrun's; default all.")] = None,
    vllm: Version = None,
    parser: Annotated[Path | None, option("--parser", metavar="PYTHON", help="Also ask the parser of the vLLM in this Python.")] = None,
    folder: Folder = None,
    json: Json = False,
) -> None:
    """Check recipes: every variant, profile and method.

    Prints `file:line: message` for each problem; the exit code is 0 if all can be used, 2 if not.
    """
    from sparkd.recipe_book import AsWritten
    from sparkd.recipe_check import checked, load, parsed

    book, release = _book(folder), _release(vllm)
    problems: list[Problem] = []
    found, count = [], 0
    for path in files or list(book.names().values()):
        file, wrong = load(path, AsWritten())
        problems += wrong
        count += 1
        if file is not None:
            book.keep(file)
            result = checked(file, book, release)
            problems += result.problems
            found += result.resolved
    if parser is not None:
        problems += parsed(found, str(parser))
    wrong = [problem for problem in problems if problem.severity == "error"]
    if _json(ctx, json):
        told = [_problem(problem) for problem in problems]
        say_json({"ok": not wrong, "recipes": count, "choices": len(found), "problems": told})
    else:
        sys.stdout.writelines(f"{problem}\n" for problem in problems)
        told_count = f"{len(wrong)} to mend" if wrong else "can be used"
        sys.stdout.write(f"{count} recipe{'s' if count != 1 else ''}, {len(found)} ways to use them: {told_count}\n")
    if wrong:
        raise typer.Exit(ConfigError.exit_code)


@recipes.command("import")
def import_(
    ctx: typer.Context,
    file: Annotated[Path, argument(metavar="FILE", help="A recipe of eugr (version 1) or sparkrun (version 2).")],
    settings: Annotated[list[str] | None, option("-o", metavar="KEY=VALUE", help="In place of one of its defaults.")] = None,
    to: Annotated[Path | None, option("--to", metavar="FILE", help="Write it there, in place of printing it.")] = None,
    vllm: Version = None,
    json: Json = False,
) -> None:
    """Turn another launcher's recipe into one of sparkd's.

    Shell hooks are never taken over. What was left out is told on stderr and stands at the recipe's head.
    """
    from sparkd.recipe_book import AsWritten
    from sparkd.recipe_file import parse_recipe
    from sparkd.recipe_import import imported

    try:
        raw = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: it cannot be read: {error.strerror}. Give the path of a recipe.") from None
    found = imported(raw, str(file), _pairs(settings or []), _release(vllm))
    _, problems = parse_recipe(file.stem, found.text.encode(), f"{file} (imported)", AsWritten())
    if to is not None:
        try:
            with to.open("x", encoding="utf-8") as out:
                out.write(found.text)
        except OSError as error:
            raise ConfigError(f"{to}: it cannot be written: {error.strerror}. Give a new file in an existing folder.") from None
    if _json(ctx, json):
        told = [_problem(problem) for problem in problems]
        say_json({"recipe": found.recipe, "text": found.text, "notes": list(found.notes), "problems": told})
        return
    if to is None:
        sys.stdout.write(found.text)
    sys.stdout.flush()
    for line in (*found.notes, *map(str, problems)):
        sys.stderr.write(f"{line}\n")


def _book(folder: Path | None) -> Book:
    from sparkd.cached import config_of
    from sparkd.recipe_book import AsWritten, Book

    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--dir {folder}: there is no such folder.")
    return Book(folder or config_of(None, os.environ).recipes_dir, AsWritten())


def _release(version: str | None) -> Release:
    """The one that was named, else that of the vLLM beside sparkd, else the one that the tables were read off."""
    from sparkd.installed import release_in
    from sparkd.vllm_flags import release_of
    from sparkd.vllm_history import READ_OFF

    if version is not None:
        if (release := release_of(version)) is None:
            raise ConfigError(f"--vllm {version}: a version such as 0.32.0 is expected.")
        return release
    return release_in(None) or READ_OFF


def _pairs(pairs: list[str]) -> dict[str, Any]:
    import yaml

    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"-o {pair}: KEY=VALUE is expected, such as -o max_model_len=8192.")
        try:
            found[key] = yaml.safe_load(text)
        except yaml.YAMLError:
            found[key] = text
    return found


def _problem(problem: Problem) -> dict[str, Any]:
    return {"file": problem.file, "line": problem.line, "severity": problem.severity, "message": problem.message}


def _json(ctx: typer.Context, json: bool) -> bool:
    return json or (ctx.find_root().obj or Asked()).json
