"""Owns what is said of a recipe: whether each of its variants, profiles and methods can be used, and what one comes to. Never prints."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkd.config import ModelConfig, parse_model
from sparkd.config_fields import Method, ProfileName
from sparkd.errors import ConfigError, SparkdError
from sparkd.recipe_book import VARIANT, Book
from sparkd.recipe_file import RecipeFile, parse_recipe, read_recipe
from sparkd.recipe_import import imported, is_foreign
from sparkd.recipes import PROFILES, offered
from sparkd.speculation import NOTES
from sparkd.vllm_flags import translated
from sparkd.vllm_history import READ_OFF, Release
from sparkd.yamlfile import MAX_BYTES, Problem, parse
from workers.interpreter import module_command, program_environment

PARSE_TIMEOUT_S = 300.0
# Where a draft lies inside the checkpoint, the model has to be a folder.
_FOLDER = "/model"


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to use a recipe."""

    recipe: str
    variant: str | None = None
    profile: ProfileName | None = None
    speculative: Method | None = None

    @property
    def name(self) -> str:
        return self.recipe + (f"{VARIANT}{self.variant}" if self.variant else "")

    def entry(self) -> dict[str, Any]:
        """What stands in sparkd.yaml for it."""
        chosen = {"recipe": self.name, "profile": self.profile, "speculative": self.speculative}
        return {key: value for key, value in chosen.items() if value is not None}

    def __str__(self) -> str:
        more = [f"{key} {value}" for key, value in (("profile", self.profile), ("speculative", self.speculative)) if value]
        return ", ".join([self.name, *more])


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a choice comes to: the model, its flags and variables for one release, and what was translated."""

    choice: Choice
    model: ModelConfig
    args: tuple[str, ...]
    env: Mapping[str, str]
    notes: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def line(self) -> list[str]:
        """As vLLM's parser gets it."""
        return ["--model", self.model.model, *self.args]


@dataclass(frozen=True, slots=True)
class Checked:
    """problems: errors and warnings. resolved: every choice that comes to a model."""

    problems: list[Problem] = field(default_factory=list)
    resolved: list[Resolved] = field(default_factory=list)


def load(path: Path, environ: Mapping[str, str]) -> tuple[RecipeFile | None, list[Problem]]:
    """A recipe's file, ours or one that has to be imported; what the import leaves out are warnings."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError:
        return read_recipe(path, environ)  # says why
    ours = parse_recipe(path.stem, raw, str(path), environ)
    if ours[0] is not None or not is_foreign(parse(raw, str(path), {}).table):
        return ours
    try:
        found = imported(raw, str(path))
    except ConfigError as error:
        return None, [Problem(None, None, error.message)]
    file_, problems = parse_recipe(path.stem, found.text.encode(), f"{path} (imported)", environ)
    return file_, [*(Problem(str(path), None, note, "warning") for note in found.notes), *problems]


def choices(file: RecipeFile) -> Iterator[Choice]:
    """Every variant in every profile with every method; None for what is not chosen."""
    for variant in (None, *file.recipe.variants):
        for profile in (None, *PROFILES):
            for method in (None, *offered(file, variant)):
                yield Choice(file.name, variant, profile, method)


def resolve(choice: Choice, book: Book, release: Release | None = READ_OFF) -> Resolved:
    """Raises ConfigError where it does not come to a model."""
    entry, file = choice.entry(), book.find(choice.name)
    if choice.variant is None or choice.variant in file.recipe.variants:
        offers = file.speculation(choice.variant)
        draft = getattr(offers, choice.speculative or offers.default, None)
        if "{model}" in (getattr(draft, "model", None) or ""):
            entry["model"] = _FOLDER
    model = parse_model(file.name, entry, over_admin=False, book=book)
    said = translated(model.vllm_flags(), {name: value.get_secret_value() for name, value in model.env.items()}, release)
    return Resolved(choice, model, said.args, said.env, said.notes, said.refused)


def checked(file: RecipeFile, book: Book, release: Release | None = READ_OFF) -> Checked:
    """Resolve every choice. A sentence that holds for several is told once, with the first of them."""
    result, told = Checked(), set[str]()

    def tell(choice: Choice, message: str, severity: str) -> None:
        if message not in told:
            told.add(message)
            result.problems.append(Problem(file.path, None, f"{choice}: {message}", severity))

    for choice in choices(file):
        try:
            found = resolve(choice, book, release)
        except ConfigError as error:
            tell(choice, error.message, "error")
            continue
        result.resolved.append(found)
        for message in found.refused:
            tell(choice, message, "error")
        for message in found.notes:
            tell(choice, message, "warning")
    if release is not None and file.recipe.needs_vllm and release < _release(file.recipe.needs_vllm):
        message = f"it needs vLLM {file.recipe.needs_vllm} or newer, and this is {release[0]}.{release[1]}."
        result.problems.append(Problem(file.path, None, message))
    return result


def parsed(found: Sequence[Resolved], runtime: str) -> list[Problem]:
    """What the parser of the vLLM in `runtime`, a Python interpreter, does not take. Raises SparkdError where it cannot be asked."""
    try:
        done = subprocess.run(
            module_command(runtime, "workers.parse_args"),
            input=json.dumps([each.line for each in found]),
            capture_output=True,
            text=True,
            timeout=PARSE_TIMEOUT_S,
            env=program_environment(os.environ),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SparkdError(f"{runtime} cannot be asked for its parser: {type(error).__name__}. Give the Python that has vLLM.") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise SparkdError(f"{runtime} has no parser to ask: {last[:300]}. Give the Python that has vLLM.")
    answers = zip(found, json.loads(done.stdout), strict=True)
    return [Problem(None, None, f"{each.choice}: vLLM's parser says: {said}") for each, said in answers if said is not None]


def summary(file: RecipeFile) -> dict[str, Any]:
    """One line of the list."""
    settings = {key: value for table in file.settings(None) for key, value in table.items()}
    decode = [figure for figure in file.recipe.expected if figure.what == "decode_tokens_per_s"]
    return {
        "name": file.name,
        "description": file.recipe.description,
        "model": file.recipe.model,
        "quantize": settings.get("quantize"),
        "nodes": file.recipe.nodes.min,
        "speculative": file.recipe.speculative.default,
        "methods": offered(file, None),
        "variants": list(file.recipe.variants),
        "decode_tokens_per_s": decode[0].value if decode else None,
        "path": file.path,
    }


def described(file: RecipeFile, found: Resolved) -> dict[str, Any]:
    """The whole recipe, and what the choice comes to."""
    recipe = file.recipe
    variant = recipe.variants.get(found.choice.variant or "")
    figures = [*(variant.expected if variant else ()), *recipe.expected]
    container = (variant.container if variant else None) or recipe.container
    method = found.model.speculative or file.speculation(found.choice.variant).default
    draft = getattr(file.speculation(found.choice.variant), method, None) if method in ("mtp", "dflash") else None
    spec = found.model.model_dump(mode="json", exclude_defaults=True, exclude={"name", "env"})
    return {
        **summary(file),
        "model": file.model(found.choice.variant),
        "choice": found.choice.entry(),
        "container": container.model_dump(mode="json", exclude_none=True) if container else None,
        "nodes": recipe.nodes.model_dump(mode="json"),
        "needs_vllm": recipe.needs_vllm,
        "spec": spec | ({"env": dict(found.env)} if found.env else {}),
        "flags": list(found.args),
        "env": dict(found.env),
        "translated": [*found.notes, *(f"refused: {reason}" for reason in found.refused)],
        "speculation": {"method": method, "note": " ".join(filter(None, (NOTES[method], _sentence(draft.note if draft else None))))},
        "variants": {name: each.description for name, each in recipe.variants.items()},
        "profiles": {name: profile.description for name, profile in PROFILES.items()},
        "sampling": recipe.sampling,
        "expected": [figure.model_dump(mode="json", exclude_none=True) for figure in figures],
        "sources": dict(recipe.sources),
        "notes": [*(variant.notes if variant else ()), *recipe.notes],
    }


def _sentence(note: str | None) -> str | None:
    return note and note[0].upper() + note[1:].rstrip(".") + "."


def _release(text: str) -> Release:
    major, _, minor = text.partition(".")
    return int(major), int(minor)
