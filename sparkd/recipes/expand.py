"""Owns how an entry with a recipe is expanded: recipe, variant, profile and speculation, overridden by the entry's own keys. Never
validates a key's value.

The result is a plain entry of sparkd.yaml, so that later steps know nothing of recipes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from sparkd.recipes.library import RecipeLibrary
from sparkd.schema.engine_flags import contradictions
from sparkd.schema.fields import Method, ProfileName, absolute_from
from sparkd.schema.overlay import dotted, table_of
from sparkd.schema.yaml_file import ConfigProblem, Items, Location, Table
from sparkd.vllm.reserved_args import cache_flags
from sparkd.vllm.translate import SPECULATIVE, draft_method, flag_name, speculative_config, values_of, without

if TYPE_CHECKING:
    from sparkd.recipes.file import RecipeFile
    from sparkd.recipes.speculation import Speculating

KEYS = ("recipe", "profile", "speculative")
METHODS: tuple[Method, ...] = get_args(Method)
# Maps that are merged with the layer below; every other key replaces its value.
_MAPS = ("env", "metadata")
_ARGS = "extra_args"
# A layer that sets the first key removes the others from the layers below.
_INSTEAD_OF: Mapping[str, tuple[str, ...]] = {
    "gpu_memory_utilization": ("kv_cache", "kv_margin_gib"),
    "kv_cache": ("gpu_memory_utilization",),
    "kv_margin_gib": ("gpu_memory_utilization",),
    "quantize": ("quantization", "load_format"),
    "quantization": ("quantize",),
    "load_format": ("quantize",),
}


@dataclass(frozen=True, slots=True)
class Profile:
    """Settings for a kind of use. speculative: the method for an entry that does not set one."""

    description: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    speculative: Method | None = None


# Numbers of requests from the Spark vLLM guide: 2 for one person and the background calls of a chat program (chapter 8, the walk-through to
# 256K), 4 as the most that hardly slow one stream (2 and 8; the vLLM blog on DGX Spark), 16 as the most that it measured on a 30B model
# (2). Speculation costs throughput with many requests (14.1).
PROFILES: Mapping[ProfileName, Profile] = {
    "single-user": Profile(
        "one person: the cache holds two requests of full length, more memory is free", {"max_num_seqs": 2, "kv_cache": {"sequences": 2}}
    ),
    "balanced": Profile("a few people: four requests at a time, the cache takes all free memory", {"max_num_seqs": 4, "kv_cache": "auto"}),
    "throughput": Profile("many requests: sixteen at a time, no speculation", {"max_num_seqs": 16, "kv_cache": "auto"}, "off"),
}  # fmt: skip


def book_of(recipes_dir: Any, state_dir: Any, base: Path | None, environ: Mapping[str, str]) -> RecipeLibrary:
    """The recipes for a configuration that is not validated yet; the validation reports wrong paths later. None: the usual folder."""

    def folder(value: Any) -> Path | None:
        try:
            return absolute_from(Path(value), base) if isinstance(value, str | Path) else None
        except ValueError:
            return None

    return RecipeLibrary(folder(recipes_dir), environ, folder(state_dir))


def expand_models(models: Any, book: RecipeLibrary, problems: list[ConfigProblem]) -> None:
    """Replace each model's entry in the tree of the configuration by its expanded entry."""
    if not isinstance(models, Table):
        return
    for name, entry in models.items():
        if isinstance(entry, Table):
            models[name] = expanded(name, entry, book, problems)


def expanded(name: str, entry: Table, book: RecipeLibrary, problems: list[ConfigProblem]) -> Table:
    """The entry of the model `name` with the keys of its recipe, profile and speculation, each key with its place.

    The entry's own keys override; `env` and `metadata` are merged, and its `extra_args` follow the recipe's. A contradiction is a problem;
    the validation reports a value of the wrong type.
    """
    choices = {key: entry[key] if isinstance(entry.get(key), str) else None for key in KEYS}
    if entry.get("speculative") is False:
        choices["speculative"] = "off"
    for key, message in contradictions(entry, _words(entry)):
        problems.append(entry.places[key].problem(f"models.{name}.{message}", key=("models", name, key)))
    if entry.get("recipe") is not None and choices["recipe"] is None:
        return _with_some_model(entry)
    if all(value is None for value in choices.values()):
        return entry
    file, variant = None, None
    if isinstance(choices["recipe"], str):
        file, variant = _looked_up(choices["recipe"], entry.places["recipe"], name, book, problems)
        if file is None:
            return _with_some_model(entry)
    merged = Table()
    for layer in _layers(file, variant, choices["profile"], entry, merged):
        _lay(merged, layer)
    place = entry.places.get("recipe", Location())
    if file is not None and "model" not in entry:
        merged.put("model", file.model(variant), file.place())
    _lay(merged, _speculation(name, file, variant, choices, merged, entry, problems))
    _lay(merged, entry)
    if file is not None:
        _check_nodes(name, file, merged, problems, place)
    return merged


def offered(file: RecipeFile, variant: str | None) -> list[Method]:
    """The methods of speculative decoding that a recipe offers."""
    drafts = file.speculation(variant)
    return [method for method in METHODS if method not in ("mtp", "dflash") or getattr(drafts, method) is not None]


def default_method(file: RecipeFile, variant: str | None) -> str:
    """The recipe's default for speculation: one of METHODS, or vLLM's name for the method in the recipe's own flags."""
    named = file.speculation(variant).default
    args = [str(arg) for table in file.settings(variant) if isinstance(listed := table.get(_ARGS), list) for arg in listed]
    config = speculative_config(args)
    return draft_method(config) if named == "off" and config is not None else named


def _looked_up(
    wanted: str, place: Location, model: str, book: RecipeLibrary, problems: list[ConfigProblem]
) -> tuple[RecipeFile | None, str | None]:
    name, variant = book.split(wanted)
    file, wrong = book.read(name, variant)
    key = ("models", model, "recipe")
    if file is None:
        own = [place.problem(f"{dotted(key)}: {_of_file(problem)}", key=key) for problem in wrong]
        located = [replace(problem, key=key) if problem.line else mine for problem, mine in zip(wrong, own, strict=True)]
        # Two models may have one recipe.
        problems += [problem for problem in located if problem not in problems]
    elif variant is not None and variant not in file.recipe.variants:
        variants = ", ".join(file.recipe.variants) or "none"
        message = f"{dotted(key)}: {name} has no variant {variant[:64]!r}{book.no_registry(variant)}. It has: {variants}."
        problems.append(place.problem(message, key=key))
        return None, None
    return file, variant


def _of_file(problem: ConfigProblem) -> str:
    return f"{problem.file}: {problem.message}" if problem.file else problem.message


def _with_some_model(entry: Table) -> Table:
    """The entry, with a placeholder where `model` is missing: an unusable recipe is then reported once, not again as a missing model."""
    stand_in = Table()
    _lay(stand_in, entry)
    if "model" not in stand_in:
        stand_in.put("model", "unknown/unknown", entry.places["recipe"])
    return stand_in


def _layers(file: RecipeFile | None, variant: str | None, profile: Any, entry: Table, below: Table) -> Iterable[Table]:
    """The layers of an entry, lowest first. below: the merge of the layers so far. A profile does not size the cache where the recipe's
    flags do."""
    if file is not None:
        yield from file.settings(variant)
    if profile in PROFILES:
        sized = any(True for _ in cache_flags(_words(below)))
        settings = {key: value for key, value in PROFILES[profile].settings.items() if key != "kv_cache" or not sized}
        yield table_of(settings, entry.places["profile"])
        if file is not None and (own := file.profile(profile)) is not None:
            yield own


def _speculation(
    name: str,
    file: RecipeFile | None,
    variant: str | None,
    choices: Mapping[str, Any],
    merged: Table,
    entry: Table,
    problems: list[ConfigProblem],
) -> Table:
    """The keys that the chosen method sets. Keys of the entry that exclude the method, and a second configuration of it, are problems."""
    key = ("models", name, "speculative")
    method, place = choices["speculative"], entry.places.get("speculative", entry.places.get("recipe", Location()))
    configured, written = (_speculative(_words(layer)) for layer in (entry, merged))
    if method is None and not configured:
        method = PROFILES[choices["profile"]].speculative if choices["profile"] in PROFILES else None
        if method is None and file is not None:
            method = file.speculation(variant).default
            if written and method == "off":
                return Table()  # the recipe's own flags stay
    if method not in METHODS:
        return Table()
    from sparkd.recipes.speculation import speculating

    model = entry.get("model", merged.get("model"))
    offers = file.speculation(variant) if file is not None else None
    config = speculative_config(_words(merged))
    if config is not None and draft_method(config) == method and getattr(offers, method, None) is None and not configured:
        return Table()
    try:
        sequences, quantize = (entry.get(key, merged.get(key)) for key in ("max_num_seqs", "quantize"))
        added = speculating(method, offers, str(model), sequences, quantize is not None)
    except ValueError as error:
        problems.append(place.problem(f"{dotted(key)} {error}.", key=key))
        return Table()
    if configured or (written and choices["speculative"] is None and method != "off"):
        whose = "extra_args" if configured else "the extra_args of the recipe"
        message = f"models.{name}: {SPECULATIVE} in {whose} and 'speculative:' contradict each other: remove one of them."
        problems.append(place.problem(message, key=key))
    problems += _contradictions(name, method, added, merged, entry)
    settings = {key: value for key, value in added.settings.items() if key in added.own or merged.get(key) is None}
    layer = table_of({**settings, "env": dict(added.env)} if added.env else settings, place)
    if isinstance(merged.get(_ARGS), Items):
        args = [arg for arg in without(_words(merged), SPECULATIVE[2:]) if flag_name(arg) not in added.drops]
        merged.put(_ARGS, _items(args, merged.places[_ARGS]), merged.places[_ARGS])
    if added.args:
        layer.put(_ARGS, _items(added.args, place), place)
    return layer


def _words(layer: Table) -> list[str]:
    """The layer's extra_args; empty where they are no list."""
    args = layer.get(_ARGS)
    return [str(arg) for arg in args if isinstance(arg, str | int | float)] if isinstance(args, list) else []


def _speculative(args: Iterable[str]) -> bool:
    return any(flag_name(arg) == SPECULATIVE[2:] for arg in args)


def _contradictions(model: str, method: Method, added: Speculating, merged: Table, entry: Table) -> Iterator[ConfigProblem]:
    """A problem for each key, flag and variable of the entry, or of its recipe and profile, that excludes the draft."""
    path, chosen = f"models.{model}", ("models", model, "speculative")
    for key, allowed in added.fixed.items():
        holder = entry if key in entry else merged
        value, needs = holder.get(key), " or ".join(map(str, allowed))
        if value is None or value in allowed or (holder is merged and key in added.own):
            continue
        problem = f"{path}.{key}: speculative {method} needs {needs}, because {added.why}. Remove {key}, or choose another method."
        if holder is merged:
            problem = f"{path}.speculative: {method} needs {key} {needs}, because {added.why}, and the recipe has {str(value)[:48]}. "
            problem += f"Set {key} of the model to one of those, or choose another method."
        yield holder.places[key].problem(problem, key=("models", model, key) if holder is entry else chosen)
    for flag, wanted in added.flags.items():
        for layer, whose in ((merged, "the recipe"), (entry, path)):
            other = next((value for *_, value in reversed(list(values_of(_words(layer), flag))) if value.upper() != wanted), None)
            if other is not None:
                yield layer.places[_ARGS].problem(
                    f"{path}.speculative: {method} needs --{flag} {wanted}, and extra_args of {whose} have {other[:48]}. "
                    "Remove one of them, or choose another method.",
                    key=chosen,
                )
    for name, wanted in added.env.items():
        for layer, whose in ((merged, "the recipe"), (entry, path)):
            variables = _merged_map(Table(), layer.get("env"))
            if isinstance(variables, Table) and str(variables.get(name, wanted)) != wanted:
                yield variables.places[name].problem(
                    f"{path}.speculative: {method} needs {name}={wanted}, and env of {whose} has another value. "
                    "Remove one of them, or choose another method.",
                    key=chosen,
                )


def _check_nodes(name: str, file: RecipeFile, merged: Table, problems: list[ConfigProblem], place: Location) -> None:
    """Check the number of ranks against the recipe's nodes; `auto` becomes 1 where the recipe is for one node."""
    nodes, size = file.recipe.nodes, merged.get("tensor_parallel", "auto")
    if size == "auto" and nodes.max == 1:
        merged.put("tensor_parallel", 1, place)
    if isinstance(size, bool) or not isinstance(size, int):
        return
    if size < nodes.min or (nodes.max is not None and size > nodes.max):
        most = "" if nodes.max is None else f", at most {nodes.max}"
        key = ("models", name, "tensor_parallel")
        message = f"{dotted(key)} is {size}; {file.name} needs at least {nodes.min}{most}: set it to that, or take another recipe."
        problems.append(merged.places.get("tensor_parallel", place).problem(message, key=key))


def _lay(under: Table, layer: Table) -> None:
    """Put `layer` over `under`, in place."""
    for key, value in layer.items():
        for other in _INSTEAD_OF.get(key, ()):
            if value is not None and other not in layer and other in under:
                del under[other]
        below, place = under.get(key), layer.places[key]
        if key in _MAPS and isinstance(below, Table):
            value = _merged_map(below, value)
        elif key == _ARGS and isinstance(below, Items) and isinstance(value, list | tuple):
            joined = _items(below, place)
            joined.places = [*getattr(below, "places", ())]
            joined += value
            joined.places += getattr(value, "places", [place] * len(value))
            value = joined
        under.put(key, value, place)


def _merged_map(below: Table, above: Any) -> Any:
    """The merge of two maps, in which the upper overrides. llama-swap's list of NAME=value counts as a map; any other value is returned
    for the validation."""
    if isinstance(above, list | tuple) and all(isinstance(item, str) and "=" in item for item in above):
        places = getattr(above, "places", [Location()] * len(above))
        pairs = Table()
        for item, place in zip(above, places, strict=True):
            name, _, text = item.partition("=")
            pairs.put(name, text, place)
        above = pairs
    if not isinstance(above, Table):
        return above
    both = Table()
    for source in (below, above):
        for name, value in source.items():
            both.put(name, value, source.places[name])
    return both


def _items(values: Iterable[Any], place: Location) -> Items:
    items = Items()
    items.extend(values)
    items.places = [place] * len(items)
    return items
