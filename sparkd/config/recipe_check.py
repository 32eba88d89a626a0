"""Checks a recipe: its errors, the model that it comes to, and its risks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparkd.config.config import ModelConfig, parse_model
from sparkd.config.yaml_file import MAX_BYTES, ConfigProblem, parse
from sparkd.errors import ConfigError
from sparkd.recipes.file import RecipeFile, is_foreign, parse_recipe, read_recipe
from sparkd.recipes.importer import Imported, Parser, imported, no_parser
from sparkd.recipes.library import AT, AsWritten, RecipeLibrary
from sparkd.vllm.flags import draft_of, speculative_config
from workers.host import regular_file
from workers.host.hub_cache import is_hub_id

_TRUSTS = (
    "trust_remote_code: the engine runs Python code that comes with {}, as the user that sparkd runs as. Read that code before the first "
    "start, or remove the key."
)
_FOLDER_RISK = "{} is a folder of the machine that runs the recipe: see that the one here is what you mean."


def load(path: Path, environ: Mapping[str, str], parser: Parser = no_parser) -> tuple[RecipeFile | None, list[ConfigProblem]]:
    """A recipe's file, ours or one that has to be imported; what the import leaves out are warnings. parser: as for the import."""
    try:
        raw = regular_file.read(path, MAX_BYTES + 1)
    except OSError:
        return read_recipe(path, environ)  # says why
    if not is_foreign(parse(raw, str(path), environ).values):
        file, problems = parse_recipe(path.stem, raw, str(path), environ)
        return file, problems
    try:
        recipe = imported(raw, str(path), parser=parser)
    except ConfigError as error:
        return None, [ConfigProblem(str(path), error.line, error.explanation)]
    file_, problems = parse_recipe(path.stem, recipe.text.encode(), f"{path} (imported)", environ)
    return file_, [*(ConfigProblem(str(path), None, note, "warning") for note in (*recipe.missing, *recipe.notes)), *problems]


def validated(recipe: Imported, name: str, shown: str) -> tuple[Imported, list[ConfigProblem]]:
    """(the recipe with its risks, which its text then begins with; why it cannot be used: its file is refused, or comes to no model)."""
    file, problems = parse_recipe(name, recipe.text.encode(), shown, AsWritten())
    if file is None:
        return recipe, problems
    risks = [_TRUSTS.format(file.recipe.model)] if file.trusting() else []
    risks += [_FOLDER_RISK.format(path) for path in file.repositories() if not is_hub_id(path)]
    head = "".join(f"# {line}\n" for line in ("RISKS:", *risks, "")) if risks else ""
    book = RecipeLibrary(None, AsWritten())
    book.keep(file)
    return replace(recipe, text=head + recipe.text, risks=tuple(risks)), checked(file, book)


def resolve(name: str, book: RecipeLibrary) -> ModelConfig:
    """The model that a recipe comes to. Raises ConfigError where it comes to none."""
    return parse_model(book.find(name).name.replace(AT, ":"), {"recipe": name}, over_admin=False, book=book)


def checked(file: RecipeFile, book: RecipeLibrary) -> list[ConfigProblem]:
    """Why the recipe comes to no model; empty where it does."""
    try:
        resolve(file.name, book)
    except ConfigError as error:
        return [ConfigProblem(error.file or file.path, error.line, error.explanation)]
    return []


def summary(file: RecipeFile) -> dict[str, Any]:
    """One line of the list."""
    decode = [figure for figure in file.recipe.expected if figure.what == "decode_tokens_per_s"]
    return {
        "name": file.name,
        "description": file.recipe.description,
        "model": file.recipe.model,
        "quantize": file.settings.get("quantize"),
        "nodes": file.recipe.nodes.min,
        "speculative": _method(file.arguments),
        "decode_tokens_per_s": decode[0].value if decode else None,
        "path": file.path,
    }


def described(file: RecipeFile, model: ModelConfig) -> dict[str, Any]:
    """The whole recipe, and the model that it comes to."""
    recipe, env = file.recipe, {name: value.get_secret_value() for name, value in model.env.items()}
    spec = model.model_dump(mode="json", exclude_defaults=True, exclude={"name", "env"})
    return {
        **summary(file),
        "container": recipe.container.model_dump(mode="json", exclude_none=True) if recipe.container else None,
        # A Spark has one GPU: each rank is on a node of its own.
        "nodes": recipe.nodes.model_dump(mode="json") | {"min": max(recipe.nodes.min, spec.get("tensor_parallel", 1))},
        "needs_vllm": recipe.needs_vllm,
        "spec": spec | ({"env": env} if env else {}),
        "flags": model.vllm_flags(),
        "env": env,
        "sampling": recipe.sampling,
        "expected": [figure.model_dump(mode="json", exclude_none=True) for figure in recipe.expected],
        "sources": dict(recipe.sources),
        "notes": list(recipe.notes),
    }


def _method(args: Sequence[str]) -> str:
    config = speculative_config(args)
    return "off" if config is None else draft_of(config).method
