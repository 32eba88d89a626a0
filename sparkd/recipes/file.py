"""The recipe file: an entry's keys with figures, notes and sources, and reading one with all of its problems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, ValidationError, field_validator, model_validator

from sparkd.config import yaml_file
from sparkd.config.engine_flags import arguments
from sparkd.config.fields import Metadata, PositiveCount, Section, Word, no_bool
from sparkd.config.overlay import in_order, problems_of
from sparkd.config.refusal import refuse
from sparkd.config.yaml_file import ConfigProblem, Document
from sparkd.errors import ConfigError
from sparkd.vllm.flags import parsed, speculative_config
from workers.host import regular_file

Text = Annotated[str, StringConstraints(min_length=1, max_length=2000, strip_whitespace=True)]

# Keys that belong to an operator's entry and are refused in a recipe.
_THE_OPERATORS = ("recipe", "model", "aliases", "unlisted", "preload", "ttl", "runtime", "entrypoint")
SUFFIXES = (".yaml", ".yml")
# vLLM accepts this in place of a draft's model.
_NGRAM = "[ngram]"
# Keys that only recipes of other launchers have.
_FOREIGN = (
    "recipe_version", "command", "defaults", "runtime", "min_nodes", "max_nodes", "solo_only", "cluster_only", "build_args", "mods", "env",
)  # fmt: skip


def _image(value: Any) -> Any:
    return {"image": value} if isinstance(value, str) else value


class ContainerImage(Section):
    """A container image. kind: the kind of its entry point: vllm-openai runs `vllm serve` itself, ngc runs the command that it gets."""

    image: Word
    kind: Literal["vllm-openai", "ngc", "other"] = "other"
    note: Text | None = None


class NodeCount(Section):
    """The numbers of nodes that the recipe was run on; on a Spark that is the tensor-parallel size."""

    min: PositiveCount = 1
    max: PositiveCount | None = None

    @model_validator(mode="after")
    def _ordered(self) -> NodeCount:
        if self.max is not None and self.max < self.min:
            raise ValueError("max must be at least min")
        return self


class Figure(Section):
    """A published number with its source. Never an estimate."""

    what: Literal[
        "active_parameters", "decode_tokens_per_s", "disk_gb", "kv_bytes_per_token", "kv_gib", "kv_tokens", "load_s", "parameters",
        "prefill_tokens_per_s", "total_decode_tokens_per_s", "total_gb", "ttft_s", "weights_gib_per_rank",
    ]  # fmt: skip
    value: Annotated[float, BeforeValidator(no_bool), Field(ge=0)]
    to: Annotated[float, Field(ge=0)] | None = None
    when: Text | None = None
    source: Word


class Recipe(Section):
    """A proven way to serve one model. settings: keys of an entry in sparkd.yaml. sources: the names that figures and notes cite."""

    description: Text
    model: Word
    sources: Annotated[dict[str, Text], Field(min_length=1)]
    needs_vllm: Annotated[str, StringConstraints(pattern=r"^\d{1,3}\.\d{1,4}$")] | None = None
    nodes: NodeCount = NodeCount()
    settings: dict[str, Any] = Field(default_factory=dict)
    sampling: dict[str, Metadata] = Field(default_factory=dict)
    expected: tuple[Figure, ...] = ()
    notes: tuple[Text, ...] = ()
    container: Annotated[ContainerImage, BeforeValidator(_image)] | None = None

    @field_validator("settings")
    @classmethod
    def _without_the_operators(cls, settings: dict[str, Any]) -> dict[str, Any]:
        if key := next((key for key in settings if key in _THE_OPERATORS), None):
            raise refuse(f"{key} is not allowed in a recipe: set it on the model that uses the recipe", item=key)
        return settings

    @model_validator(mode="after")
    def _cited(self) -> Recipe:
        if unknown := sorted({figure.source for figure in self.expected} - self.sources.keys()):
            raise ValueError(f"'{unknown[0]}' is cited, but not listed under sources")
        return self


@dataclass(frozen=True, slots=True)
class RecipeFile:
    """A recipe and its file. document: the same values with the line of each key, for errors about a model."""

    name: str
    path: str
    recipe: Recipe
    document: Document

    @property
    def settings(self) -> dict[str, Any]:
        return self.recipe.settings

    @property
    def arguments(self) -> list[str]:
        """The extra_args of its settings."""
        return arguments(self.settings)

    def repositories(self) -> list[str]:
        """The model and the draft that the file names: a hub id or a path each."""
        draft = (speculative_config(self.arguments) or {}).get("model")
        return [self.recipe.model, *([draft] if isinstance(draft, str) and draft != _NGRAM else [])]

    def trusting(self) -> bool:
        """Whether the recipe runs Python code that comes with a model."""
        return bool(self.settings.get("trust_remote_code")) or parsed(self.arguments).get("trust-remote-code", False) is not False


def is_foreign(table: Mapping[str, Any]) -> bool:
    """Whether a recipe's file is in one of the other formats."""
    return not ({"sources", "settings"} & table.keys()) and any(key in table for key in _FOREIGN)


def refuse_as_model(text: str) -> None:
    """Raise ConfigError where MODEL on a command line is a recipe's file, sparkd's or another launcher's, with the right command for it."""
    path = Path(text).expanduser()
    if path.suffix not in SUFFIXES or not path.is_file():
        return
    with path.open("rb") as file:
        foreign = is_foreign(yaml_file.parse(file.read(yaml_file.MAX_BYTES + 1), text, {}).values)
    kind = "a recipe's file, not a model: put it into your recipes_dir, and give its name"
    if foreign:
        kind = f"a recipe of another launcher: `sparkd recipes import {quote(text)} --to FILE` makes one of sparkd's, for your recipes_dir"
    raise ConfigError(f"{text} is {kind}.")


def read_recipe(path: Path, environ: Mapping[str, str]) -> tuple[RecipeFile | None, list[ConfigProblem]]:
    """(the recipe or None, its problems), each problem with file, line, key, reason and fix. Never raises."""
    try:
        raw = regular_file.read(path, yaml_file.MAX_BYTES + 1)
    except OSError as error:
        cure = "Give the path of a recipe's file, or none to check all recipes"
        return None, [ConfigProblem(str(path), None, f"The recipe cannot be read: {error.strerror}. {cure}.")]
    return parse_recipe(path.stem, raw, str(path), environ)


def parse_recipe(name: str, raw: bytes, shown: str, environ: Mapping[str, str]) -> tuple[RecipeFile | None, list[ConfigProblem]]:
    """Like read_recipe, from a text. shown: the file's name in messages."""
    document = yaml_file.parse(raw, shown, environ)
    problems = document.problems
    if problems and not document.values:
        return None, problems  # nothing of it could be read, so that no key is missing
    if is_foreign(document.values):
        cure = f"`sparkd recipes import {quote(shown)} --to FILE` makes one of sparkd's"
        return None, [ConfigProblem(shown, None, f"This is a recipe of another launcher, eugr's or sparkrun's: {cure}.")]
    recipe: Recipe | None = None
    try:
        recipe = Recipe.model_validate(document.values)
    except ValidationError as error:
        problems += problems_of(error, document, Recipe)
    problems = [problem if problem.file else ConfigProblem(shown, None, problem.message, problem.severity) for problem in problems]
    if recipe is None or problems:
        return None, in_order(problems)
    return RecipeFile(name, shown, recipe, document), []
