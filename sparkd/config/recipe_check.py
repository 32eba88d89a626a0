"""Owns what is said of a recipe: whether each of its variants, profiles and methods can be used, and what one comes to. Never prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparkd.config.config import ModelConfig, parse_model
from sparkd.errors import ConfigError
from sparkd.recipes.expand import PROFILES, default_method, offered
from sparkd.recipes.file import RecipeFile, is_foreign, parse_recipe, read_recipe, recipe_of
from sparkd.recipes.importer import Imported, Parser, imported, is_fork, no_parser, parser_flags
from sparkd.recipes.library import VARIANT, AsWritten, RecipeLibrary
from sparkd.recipes.registry import is_of_hub
from sparkd.recipes.speculation import NOTES
from sparkd.schema.fields import Method, ProfileName
from sparkd.schema.yaml_file import MAX_BYTES, ConfigProblem, parse
from sparkd.vllm.arg_check import RefusedArg
from sparkd.vllm.releases import READ_OFF, Release
from sparkd.vllm.translate import draft_method, speculative_config, translated
from sparkd.vllm.unknown_names import unknown_parsers
from workers.host import regular_file

# Where a draft lies inside the checkpoint, the model has to be a folder.
_FOLDER = "/model"
_TRUSTS = (
    "trust_remote_code: the engine runs Python code that comes with {}, as the user that sparkd runs as. Read that code before the first "
    "start, or remove the key."
)
_FOLDER_RISK = "{} is a folder of the machine that runs the recipe: see that the one here is what you mean."


@dataclass(frozen=True, slots=True)
class RecipeUse:
    """One way to use a recipe."""

    recipe: str
    variant: str | None = None
    profile: ProfileName | None = None
    speculative: Method | None = None

    @property
    def name(self) -> str:
        return self.recipe + (f"{VARIANT}{self.variant}" if self.variant else "")

    def entry(self) -> dict[str, Any]:
        """Its entry in sparkd.yaml."""
        chosen = {"recipe": self.name, "profile": self.profile, "speculative": self.speculative}
        return {key: value for key, value in chosen.items() if value is not None}

    def __str__(self) -> str:
        more = [f"{key} {value}" for key, value in (("profile", self.profile), ("speculative", self.speculative)) if value]
        return ", ".join([self.name, *more])


@dataclass(frozen=True, slots=True)
class Resolved:
    """A choice as it comes out: the model, its flags and variables for one release, and what was translated. file: the recipe's."""

    choice: RecipeUse
    model: ModelConfig
    args: tuple[str, ...]
    env: Mapping[str, str]
    notes: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    file: str | None = None

    @property
    def line(self) -> list[str]:
        """The command line for vLLM's parser."""
        return ["--model", self.model.model, *self.args]


@dataclass(frozen=True, slots=True)
class Checked:
    """problems: errors and warnings. resolved: every choice that comes to a model."""

    problems: list[ConfigProblem] = field(default_factory=list)
    resolved: list[Resolved] = field(default_factory=list)


def load(path: Path, environ: Mapping[str, str], parser: Parser = no_parser) -> tuple[RecipeFile | None, list[ConfigProblem]]:
    """A recipe's file, ours or one that has to be imported; what the import leaves out are warnings. parser: as for the import."""
    try:
        raw = regular_file.read(path, MAX_BYTES + 1)
    except OSError:
        return read_recipe(path, environ)  # says why
    document = parse(raw, str(path), environ)
    if not is_foreign(document.table):
        file, problems = recipe_of(path.stem, document, str(path), environ)
        return file, [*problems, *(misnamed(file) if file is not None else ())]
    try:
        recipe = imported(raw, str(path), parser=parser)
    except ConfigError as error:
        return None, [ConfigProblem(str(path), error.line, error.explanation)]
    file_, problems = parse_recipe(path.stem, recipe.text.encode(), f"{path} (imported)", environ)
    return file_, [*(ConfigProblem(str(path), None, note, "warning") for note in (*recipe.missing, *recipe.notes)), *problems]


def misnamed(file: RecipeFile) -> list[ConfigProblem]:
    """The parsers that it names and the vLLM beside sparkd does not have; a warning where its image is a fork's, which may have them."""
    problems: dict[ConfigProblem, None] = {}
    for variant in (None, *file.recipe.variants):
        container = file.container(variant)
        severity = "warning" if container is not None and is_fork(container.image) else "error"
        for settings in file.settings(variant):
            env = settings.get("env")
            for note in unknown_parsers(parser_flags(settings), env if isinstance(env, Mapping) else {}, None):
                place = settings.places.get(note.name.replace("-", "_"), settings.places.get("extra_args", file.place()))
                problems[place.problem(note, severity)] = None
    return list(problems)


def unusable(recipe: Imported, name: str, shown: str, release: Release | None) -> list[ConfigProblem]:
    """Why what was imported cannot be used: its file is refused, or a way to use it is. Empty where it can."""
    file, problems = parse_recipe(name, recipe.text.encode(), shown, AsWritten())
    if file is None:
        return problems
    book = RecipeLibrary(None, AsWritten())
    book.keep(file)
    return [problem for problem in checked(file, book, release).problems if problem.severity == "error"]


def with_risks(recipe: Imported, name: str) -> Imported:
    """The recipe with its risks, which its text then begins with. name: the recipe's."""
    file, _ = parse_recipe(name, recipe.text.encode(), name, AsWritten())
    if file is None:
        return recipe
    risks = [_TRUSTS.format(file.recipe.model)] if file.trusting() else []
    risks += [_FOLDER_RISK.format(path) for path in dict.fromkeys(file.repositories()) if not is_of_hub(path)]
    head = "".join(f"# {line}\n" for line in ("RISKS:", *risks, "")) if risks else ""
    return replace(recipe, text=head + recipe.text, risks=tuple(risks))


def choices(file: RecipeFile) -> Iterator[RecipeUse]:
    """Every variant in every profile with every method; None for what is not chosen."""
    for variant in (None, *file.recipe.variants):
        for profile in (None, *PROFILES):
            for method in (None, *offered(file, variant)):
                yield RecipeUse(file.name, variant, profile, method)


def resolve(choice: RecipeUse, book: RecipeLibrary, release: Release | None = READ_OFF) -> Resolved:
    """Raises ConfigError where it does not come to a model."""
    entry, file = choice.entry(), book.find(choice.name)
    if choice.variant is None or choice.variant in file.recipe.variants:
        offers = file.speculation(choice.variant)
        draft = getattr(offers, choice.speculative or offers.default, None)
        if "{model}" in (getattr(draft, "model", None) or ""):
            entry["model"] = _FOLDER
    model = parse_model(file.name.replace(VARIANT, ":"), entry, over_admin=False, book=book)
    flags = translated(model.vllm_flags(), {name: value.get_secret_value() for name, value in model.env.items()}, release)
    return Resolved(choice, model, flags.args, flags.env, flags.notes, flags.refused, file.path)


def checked(file: RecipeFile, book: RecipeLibrary, release: Release | None = READ_OFF) -> Checked:
    """Resolve every choice. A message that several choices share is reported once, with the first of them."""
    result, reported = Checked(), set[str]()

    def tell(choice: RecipeUse, message: str, severity: str) -> None:
        if message not in reported:
            reported.add(message)
            result.problems.append(ConfigProblem(file.path, None, f"{choice}: {message}", severity))

    for choice in choices(file):
        try:
            resolved = resolve(choice, book, release)
        except ConfigError as error:
            tell(choice, error.message, "error")
            continue
        result.resolved.append(resolved)
        for message in resolved.refused:
            tell(choice, message, "error")
        for message in resolved.notes:
            tell(choice, message, "warning")
    if release is not None and file.recipe.needs_vllm and release < _release(file.recipe.needs_vllm):
        message = f"it needs vLLM {file.recipe.needs_vllm} or newer, and this is {release[0]}.{release[1]}."
        result.problems.append(ConfigProblem(file.path, None, message))
    return result


def refused_ways(resolved: Sequence[Resolved], version: str, refused: Sequence[Sequence[RefusedArg]]) -> list[ConfigProblem]:
    """The choices that a vLLM's parser does not take.

    refused: the refused arguments of each choice's line.
    """
    ways: dict[tuple[str | None, str], list[RecipeUse]] = {}
    for each, refusals in zip(resolved, refused, strict=True):
        for refusal in refusals:
            ways.setdefault((each.file, refusal.note(version)), []).append(each.choice)
    return [
        ConfigProblem(file, None, f"{choice}{f' and {len(more)} more' if more else ''}: {refusal}")
        for (file, refusal), (choice, *more) in ways.items()
    ]


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
        "speculative": default_method(file, None),
        "methods": offered(file, None),
        "variants": list(file.recipe.variants),
        "decode_tokens_per_s": decode[0].value if decode else None,
        "path": file.path,
    }


def described(file: RecipeFile, resolved: Resolved) -> dict[str, Any]:
    """The whole recipe, and what the choice comes to."""
    recipe = file.recipe
    variant = recipe.variants.get(resolved.choice.variant or "")
    figures = [*(variant.expected if variant else ()), *recipe.expected]
    container = (variant.container if variant else None) or recipe.container
    config = speculative_config(resolved.args)
    method = "off" if config is None else draft_method(config)
    draft = getattr(file.speculation(resolved.choice.variant), method, None) if method in ("mtp", "dflash") else None
    spec = resolved.model.model_dump(mode="json", exclude_defaults=True, exclude={"name", "env"})
    return {
        **summary(file),
        "model": file.model(resolved.choice.variant),
        "choice": resolved.choice.entry(),
        "container": container.model_dump(mode="json", exclude_none=True) if container else None,
        # A Spark has one GPU: each rank is on a node of its own.
        "nodes": recipe.nodes.model_dump(mode="json") | {"min": max(recipe.nodes.min, spec.get("tensor_parallel", 1))},
        "needs_vllm": recipe.needs_vllm,
        "spec": spec | ({"env": dict(resolved.env)} if resolved.env else {}),
        "flags": list(resolved.args),
        "env": dict(resolved.env),
        "translated": [*resolved.notes, *(f"refused: {reason}" for reason in resolved.refused)],
        "speculation": {
            "method": method,
            "note": " ".join(filter(None, (NOTES.get(method, ""), _sentence(draft.note if draft else None)))),
        },
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
