"""Owns the recipe file: its schema, and reading one with all of its problems. Never decides which keys a model takes from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, ValidationError, model_validator

from sparkd.errors import ConfigError
from sparkd.schema import yaml_file
from sparkd.schema.engine_flags import contradictions
from sparkd.schema.fields import Arguments, Metadata, Method, PositiveCount, ProfileName, Section, Word, no_bool
from sparkd.schema.model import ModelConfig
from sparkd.schema.overlay import canonical, in_order, problems_of
from sparkd.schema.yaml_file import ConfigProblem, Location, Table
from sparkd.vllm.reserved_args import trusts_code
from sparkd.vllm.translate import speculative_config
from workers.host import regular_file

Text = Annotated[str, StringConstraints(min_length=1, max_length=2000, strip_whitespace=True)]

# Keys that belong to an operator's entry and are refused in a recipe.
_THE_OPERATORS = ("recipe", "profile", "speculative", "model", "aliases", "unlisted", "preload", "ttl", "runtime", "entrypoint")
SUFFIXES = (".yaml", ".yml")
# vLLM accepts this in place of a draft's model.
_NGRAM = "[ngram]"
# The section that holds keys of a model.
_SETTINGS = "settings"
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
    shm_size: Word | None = None
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


class Draft(Section):
    """Settings of one speculation method for this model. needs: keys of the entry that it requires; args: vLLM flags that it requires."""

    num_speculative_tokens: PositiveCount | None = None
    # '{model}' is the model's own folder: a draft that lies inside a checkpoint has no hub id.
    model: Text | None = None
    moe_backend: Word | None = None
    needs: dict[str, Any] = Field(default_factory=dict)
    args: Arguments = ()
    note: Text | None = None
    source: Word | None = None


class Speculation(Section):
    """The drafts of a recipe. default: the method of a model whose entry does not set one."""

    default: Method = "off"
    mtp: Draft | None = None
    dflash: Draft | None = None

    @model_validator(mode="after")
    def _there(self) -> Speculation:
        if self.default in ("mtp", "dflash") and getattr(self, self.default) is None:
            raise ValueError(f"default is {self.default}, and there is no {self.default} section")
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


class Variant(Section):
    """The recipe with other weights or other settings: `NAME@VARIANT`."""

    description: Text
    model: Word | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    speculative: Speculation | None = None
    container: Annotated[ContainerImage, BeforeValidator(_image)] | None = None
    expected: tuple[Figure, ...] = ()
    notes: tuple[Text, ...] = ()


class Recipe(Section):
    """A proven way to serve one model. settings: keys of an entry in sparkd.yaml. sources: the names that figures and notes cite."""

    description: Text
    model: Word
    sources: Annotated[dict[str, Text], Field(min_length=1)]
    needs_vllm: Annotated[str, StringConstraints(pattern=r"^\d{1,3}\.\d{1,4}$")] | None = None
    nodes: NodeCount = NodeCount()
    settings: dict[str, Any] = Field(default_factory=dict)
    profiles: dict[ProfileName, dict[str, Any]] = Field(default_factory=dict)
    speculative: Speculation = Speculation()
    variants: dict[Word, Variant] = Field(default_factory=dict)
    sampling: dict[str, Metadata] = Field(default_factory=dict)
    expected: tuple[Figure, ...] = ()
    notes: tuple[Text, ...] = ()
    container: Annotated[ContainerImage, BeforeValidator(_image)] | None = None

    @model_validator(mode="after")
    def _cited(self) -> Recipe:
        every: list[Recipe | Variant] = [self, *self.variants.values()]
        offers = [each.speculative for each in every if each.speculative is not None]
        drafts = [draft for offer in offers for draft in (offer.mtp, offer.dflash)]
        cited = {figure.source for each in every for figure in each.expected}
        cited |= {draft.source for draft in drafts if draft and draft.source}
        if unknown := sorted(cited - self.sources.keys()):
            raise ValueError(f"'{unknown[0]}' is cited, but not listed under sources")
        return self


@dataclass(frozen=True, slots=True)
class RecipeFile:
    """A recipe and its file. table: the same values with the line of each key, for errors about a model."""

    name: str
    path: str
    recipe: Recipe
    table: Table

    def settings(self, variant: str | None) -> list[Table]:
        """The tables of an entry's keys: the recipe's, then the variant's."""
        return [table for table in (_inner(self.table, _SETTINGS), _inner(self.table, "variants", variant, _SETTINGS)) if table is not None]

    def profile(self, name: str) -> Table | None:
        """The keys that the recipe changes in a profile."""
        return _inner(self.table, "profiles", name)

    def model(self, variant: str | None) -> str:
        chosen = self.recipe.variants[variant].model if variant else None
        return chosen or self.recipe.model

    def speculation(self, variant: str | None) -> Speculation:
        chosen = self.recipe.variants[variant].speculative if variant else None
        return chosen or self.recipe.speculative

    def container(self, variant: str | None) -> ContainerImage | None:
        chosen = self.recipe.variants[variant].container if variant in self.recipe.variants else None
        return chosen or self.recipe.container

    def every_settings(self) -> Iterator[Mapping[str, Any]]:
        """Every map of entry keys in the file: the recipe's, its profiles', its variants' and its drafts'."""
        recipe = self.recipe
        yield from (recipe.settings, *recipe.profiles.values(), *(variant.settings for variant in recipe.variants.values()))
        for draft in self._drafts():
            yield draft.needs
            yield {"extra_args": draft.args}

    def repositories(self) -> Iterator[str]:
        """Every model and draft that the file names: a hub id or a path."""
        recipe = self.recipe
        yield from (recipe.model, *(variant.model for variant in recipe.variants.values() if variant.model is not None))
        yield from (draft.model for draft in self._drafts() if draft.model is not None)
        for settings in self.every_settings():
            config = speculative_config(_arguments(settings)) or {}
            yield from (name for name in (settings.get("model"), config.get("model")) if isinstance(name, str) and name != _NGRAM)

    def trusting(self) -> bool:
        """Whether any use of the recipe runs Python code that comes with a model."""
        return any(settings.get("trust_remote_code") or trusts_code(_arguments(settings)) for settings in self.every_settings())

    def _drafts(self) -> Iterator[Draft]:
        for offers in (self.recipe.speculative, *(variant.speculative for variant in self.recipe.variants.values())):
            yield from (draft for draft in (offers.mtp, offers.dflash) if draft is not None) if offers is not None else ()

    def place(self) -> Location:
        return self.table.places.get("model", Location(self.path))


def is_foreign(table: Mapping[str, Any]) -> bool:
    """Whether a recipe's file is in one of the other formats."""
    return not ({"sources", _SETTINGS} & table.keys()) and any(key in table for key in _FOREIGN)


def refuse_as_model(text: str) -> None:
    """Raise ConfigError where MODEL on a command line is a recipe's file, sparkd's or another launcher's, with the right command for it."""
    path = Path(text).expanduser()
    if path.suffix not in SUFFIXES or not path.is_file():
        return
    with path.open("rb") as file:
        foreign = is_foreign(yaml_file.parse(file.read(yaml_file.MAX_BYTES + 1), text, {}).table)
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
    return recipe_of(name, yaml_file.parse(raw, shown, environ), shown, environ)


def recipe_of(
    name: str, document: yaml_file.Document, shown: str, environ: Mapping[str, str]
) -> tuple[RecipeFile | None, list[ConfigProblem]]:
    """Like parse_recipe, from a parsed document."""
    problems = document.problems
    if problems and not document.table:
        return None, problems  # nothing of it could be read, so that no key is missing
    if is_foreign(document.table):
        cure = f"`sparkd recipes import {quote(shown)} --to FILE` makes one of sparkd's"
        return None, [ConfigProblem(shown, None, f"This is a recipe of another launcher, eugr's or sparkrun's: {cure}.")]
    table = canonical(document.table, Recipe, problems)
    _canonical_settings(table, problems)
    recipe: Recipe | None = None
    try:
        recipe = Recipe.model_validate(table)
    except ValidationError as error:
        problems += problems_of(error, table)
    problems = [problem if problem.file else ConfigProblem(shown, None, problem.message, problem.severity) for problem in problems]
    if recipe is None or problems:
        return None, yaml_file.masked(in_order(problems), document.env_names, environ)
    return RecipeFile(name, shown, recipe, table), []


def _canonical_settings(table: Table, problems: list[ConfigProblem]) -> None:
    """Rename the entry keys in the table to their names in sparkd.yaml; keys that a recipe may not set become problems."""
    holders: list[tuple[Table, str, tuple[str, ...]]] = [(table, _SETTINGS, (_SETTINGS,))]
    for section in ("profiles", "variants"):
        inner = _inner(table, section) or Table()
        for name, entry in inner.items():
            if section == "profiles":
                holders.append((inner, name, (section, name)))
            elif isinstance(entry, Table):
                holders.append((entry, _SETTINGS, (section, name, _SETTINGS)))
    for holder, key, path in holders:
        settings = holder.get(key)
        if not isinstance(settings, Table):
            continue
        for name in [name for name in settings if name in _THE_OPERATORS]:
            message = f"{'.'.join((*path, name))} is not allowed in a recipe. Set it on the model that uses the recipe."
            problems.append(settings.places[name].problem(message))
            del settings[name]
        holder[key] = own = canonical(settings, ModelConfig, problems, path)
        for name, message in contradictions(own, _arguments(own)):
            problems.append(own.places[name].problem(f"{'.'.join(path)}.{message}"))


def _arguments(settings: Mapping[str, Any]) -> list[str]:
    """The extra_args of these settings; empty where they are no list."""
    args = settings.get("extra_args")
    return [str(arg) for arg in args] if isinstance(args, list | tuple) else []


def _inner(table: Table, *keys: str | None) -> Table | None:
    value: Any = table
    for key in keys:
        value = value.get(key) if isinstance(value, Table) and key is not None else None
    return value if isinstance(value, Table) else None
