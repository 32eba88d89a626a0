"""Owns the merge of file, environment and flags into one tree, and the place of each of pydantic's errors. Holds no key and no default."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from sparkd.errors import ConfigError
from sparkd.nearest import nearest
from sparkd.schema import aliases
from sparkd.schema.fields import check_name
from sparkd.schema.model import ModelConfig
from sparkd.schema.refusal import EXPECTED, expected
from sparkd.schema.yaml_file import ConfigProblem, Items, Location, Table, whole

SHOWN_PROBLEMS = 20
MASK = "***"
ENV_PREFIX = "SPARKD_"
# Variables that sparkd's own command line and stub engine read; they are no keys of the file.
OTHER_ENV = ("SPARKD_CONFIG", "SPARKD_URL", "SPARKD_API_KEY", "SPARKD_ADMIN_KEY")
OTHER_ENV_FAMILY = "SPARKD_STUB_"

_QUOTED = re.compile(r"'([^']*)'")
# Keys whose values never appear in a message: API keys, tokens, and arguments that may hold them.
_SECRET_KEYS = frozenset({"keys", "env", "extra_args", "inference", "admin"})
_PATH_KEYS = frozenset(
    {"state_dir", "runtime_dir", "keys.inference_file", "keys.admin_file", "cluster.token_file", "engine.runtime", "quantized_cache.dir"}
)


def table_of(values: Mapping[str, Any], place: Location) -> Table:
    """Plain values (a flag's, the admin API's) as a tree whose every place is `place`."""
    table = Table()
    for key, value in values.items():
        table.put(_text(str(key)), _tree(value, place), place)
    return table


def canonical(table: Table, section: type[BaseModel], problems: list[ConfigProblem], path: tuple[str, ...] = ()) -> Table:
    """A copy with sparkd's own key names. An unknown key becomes a problem that names the nearest known key, and is dropped."""
    top, model = not path, section is ModelConfig
    ours = aliases.TOP if top else aliases.MODEL if model else {}
    foreign = aliases.TOP_FOREIGN if top else aliases.MODEL_FOREIGN if model else {}
    known = [name for name in section.model_fields if not (model and name == "name")]
    renamed = Table()
    for key, value in table.items():
        place = table.places[key]
        target = ours.get(key, key)
        if target.partition(".")[0] in known:
            _put(renamed, target, value, place, problems, (*path, key))
        elif key in foreign:
            problems.append(place.problem(f"{dotted((*path, key))} has no meaning here. {foreign[key]}", key=(*path, key)))
        else:
            # A stranger's map may have thousands of keys, and looking for the nearest takes longest: no more are shown.
            near = _nearest(key, [*known, *ours]) if len(problems) < SHOWN_PROBLEMS else None
            renamed.meant |= {ours.get(near, near)} if near else set()
            # Blanks and invisible characters are shown as escapes.
            spelled = key if key.isprintable() and key.split() == [key] else ascii(key)
            problems.append(place.problem(f"{dotted((*path, spelled))} is not a known key{_hint(near, path)}", key=(*path, key)))
    for key, value in list(renamed.items()):
        inner = _section(section, key)
        holds_models = top and key == "models"
        if value is None and (inner is not None or holds_models):
            del renamed[key]  # all of its lines are comments
        elif holds_models and isinstance(value, Table):
            renamed[key] = _models(value, problems)
        elif isinstance(value, Table) and (inner := inner or _optional(section, key)) is not None:
            renamed[key] = canonical(value, inner, problems, (*path, key))
    return renamed


def shown(entry: Table) -> dict[str, Any]:
    """The keys of a model's entry as plain values, with MASK for each value of `env` and for each that came out of the environment."""
    keys = {key: _masked_env(value) if key == "env" else _plain(value, entry.places[key]) for key, value in entry.items()}
    return {key: value for key, value in keys.items() if key != "name"}


def overlay_flags(tree: Table, flags: Mapping[str, Any], problems: list[ConfigProblem], section: type[BaseModel]) -> None:
    """Put flags, by dotted key, over the tree. None: the flag was not given. `models` is merged per model; any other value is replaced."""
    for key, value in flags.items():
        if value is None:
            continue
        place = Location(f"--{key.rpartition('.')[2].replace('_', '-')}")
        if key == "models":
            added = canonical(table_of({"models": value}, place), section, problems)
            for name, model in added.get("models", {}).items():
                _models_of(tree, place).put(name, model, place)
        else:
            _put(tree, key, _tree(_from_here(key, value), place), place, problems, replace=True)


def overlay_environ(
    tree: Table, environ: Mapping[str, str], referenced: Iterable[str], problems: list[ConfigProblem], section: type[BaseModel]
) -> None:
    """Put variables such as SPARKD_LISTEN and SPARKD_CLUSTER__ADDRESS over the tree: single values of the top level and of its sections. An
    empty variable counts as not set.

    A SPARKD_ variable that is no key is a problem, so that a typing error is noticed, unless the file itself names the variable.
    """
    variables = {f"{ENV_PREFIX}{'__'.join(path).upper()}": path for path in _scalars(section)}
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX) or name in OTHER_ENV or name.startswith(OTHER_ENV_FAMILY) or name in set(referenced):
            continue
        place = Location(name)
        path = variables.get(name)
        if path is None:
            hint = _hint(_nearest(name, [*variables, *OTHER_ENV]), ())
            problems.append(place.problem(f"This environment variable is not a setting{hint}"))
        elif environ[name]:
            key = ".".join(path)
            value: Any = environ[name]
            if _is_list(section, path):
                value = [item.strip() for item in value.split(",") if item.strip()]
            _put(tree, key, _tree(_from_here(key, value), place), place, problems, replace=True)


def problems_of(error: ValidationError, tree: Table, path: tuple[str, ...] = ()) -> list[ConfigProblem]:
    """pydantic's errors as problems, one for each place; the failed members of a union become one sentence.

    A key that is missing because it is misspelt is already among the problems.
    """
    found: dict[tuple[Any, ...], tuple[Location, Any, list[str], tuple[str | int, ...]]] = {}
    for one in error.errors(include_url=False, include_input=False):
        location, place, value = _locate(tree, one["loc"])
        if one["type"] == "missing" and _is_misspelt(tree, one["loc"]):
            continue
        context = one.get("ctx", {})
        if item := _item(one):
            _, place, _ = _locate(tree, (*one["loc"], *item))
        key = (*path, *location, *item)
        sentence = expected(one["type"], one["msg"], context)
        if context.get("repeats") and place.secret:
            sentence = "it comes from the environment and cannot be used (not shown, it may be a secret)"
        sentences = found.setdefault((location, one["type"] in {"refused", "value_error"}), (place, value, [], key))[2]
        if sentence not in sentences:
            sentences.append(sentence)
    return [
        place.problem(_explain((*path, *map(str, location)), place, value, sentences, complete), key=key)
        for (location, complete), (place, value, sentences, key) in found.items()
    ]


def blamed(error: ValidationError, tree: Table) -> list[tuple[str | int, ...]]:
    """The location of each of pydantic's errors, up to its last written part; the key's name where the key is missing."""
    locations = ((*one["loc"], *_item(one)) for one in error.errors(include_url=False, include_input=False))
    return list(dict.fromkeys(_locate(tree, location)[0] for location in locations))


def without_key(tree: Table, location: Sequence[str | int]) -> bool:
    """Remove the innermost written key of `location`, with its value, from the tree. False where no part of it was written."""
    value: Any = tree
    holder: Table | None = None
    key = ""
    for part in location:
        if isinstance(value, Table) and part in value:
            holder, key, value = value, str(part), value[str(part)]
        elif isinstance(value, Items) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            break
    if holder is not None:
        del holder[key]
    return holder is not None


def _item(error: Mapping[str, Any]) -> tuple[str | int, ...]:
    """The key that a validator of a whole entry names in its error."""
    item = error.get("ctx", {}).get("item") if error["type"] == "refused" else None
    return () if item is None else (item,)


def place_of(tree: Table, location: Sequence[str | int]) -> Location:
    return _locate(tree, location)[1]


def error_of(problems: Sequence[ConfigProblem], path: Sequence[str] = ()) -> ConfigError:
    """One ConfigError that reads as a list; its file, line and key are those of the first problem.

    path: of the section from which the key is counted.
    """
    errors = in_order(problem for problem in problems if problem.severity == "error")
    first, rest = errors[0], errors[1:SHOWN_PROBLEMS]
    lines = [first.message, *map(str, rest)]
    if len(errors) > SHOWN_PROBLEMS:
        lines.append(f"... and {len(errors) - SHOWN_PROBLEMS} more problems.")
    param = dotted([str(part) for part in first.key[len(path) :]]) or None
    return ConfigError("\n".join(lines), file=first.file, line=first.line, param=param)


def in_order(problems: Iterable[ConfigProblem]) -> list[ConfigProblem]:
    """The problems sorted by line; those without a line (an environment variable, a flag, a whole file) last."""
    return sorted(problems, key=lambda problem: (problem.line is None, problem.line or 0))


def dotted(path: Sequence[str]) -> str:
    return ".".join(path)


def _models(table: Table, problems: list[ConfigProblem]) -> Table:
    models = Table()
    for name, entry in table.items():
        place = table.places[name]
        try:
            check_name(name)
        except ValueError as error:
            message = f"models: {name[:64]!r} is not a valid name of a model: it needs {error}."
            problems.append(place.problem(message, key=("models", name, "name")))
            continue
        if isinstance(entry, Table | None):
            entry = canonical(entry or Table(), ModelConfig, problems, ("models", name))
            entry.put("name", name, place)
        models.put(name, entry, place)
    return models


def _models_of(tree: Table, place: Location) -> Table:
    models = tree.get("models")
    if not isinstance(models, Table):
        models = Table()
        tree.put("models", models, place)
    return models


def _put(
    tree: Table,
    key: str,
    value: Any,
    place: Location,
    problems: list[ConfigProblem],
    spelled: tuple[str, ...] = (),
    *,
    replace: bool = False,
) -> None:
    head, _, rest = key.partition(".")
    if rest:
        inner = tree.get(head)
        if not isinstance(inner, Table):
            inner = Table()
            tree.put(head, inner, place)
        _put(inner, rest, value, place, problems, spelled, replace=replace)
        return
    standing = tree.get(key)
    if replace or key not in tree or standing is None:
        tree.put(key, value, place)
    elif isinstance(standing, Table) and isinstance(value, Table):
        for name, inner_value in value.items():
            _put(standing, name, inner_value, value.places[name], problems, (*spelled, name))
    else:
        known = tree.places[key].line
        first = f" (first on line {known})" if known else ""
        problems.append(place.problem(f"{dotted(spelled)} sets {key} a second time{first}. Keep one.", key=spelled))


def _plain(value: Any, place: Location) -> Any:
    if isinstance(value, Table):
        return {key: _plain(inner, value.places[key]) for key, inner in value.items()}
    if isinstance(value, Items):
        return [_plain(item, where) for item, where in zip(value, value.places, strict=True)]
    return MASK if place.secret else value


def _masked_env(value: Any) -> Any:
    """A map of the names; llama-swap's list of NAME=value becomes one, too."""
    if isinstance(value, Mapping):
        return dict.fromkeys(value, MASK)
    return {str(pair).partition("=")[0]: MASK for pair in value} if isinstance(value, list) else MASK


def _tree(value: Any, place: Location) -> Any:
    if isinstance(value, Table | Items):
        return value
    if isinstance(value, Mapping):
        return table_of(value, place)
    if isinstance(value, list | tuple):
        items = Items()
        items.extend(_tree(item, place) for item in value)
        items.places = [place] * len(items)
        return items
    return _text(value) if isinstance(value, str) else value


def _text(value: str) -> str:
    text = whole(value)
    if text is None:
        raise ConfigError("A text holds half a character (a lone surrogate, or bytes that are not UTF-8): write it anew.")
    return text


def _from_here(key: str, value: Any) -> Any:
    """The value of a flag, with a relative path made absolute from the working folder; a path in the file counts from the file's folder."""
    if key in _PATH_KEYS and isinstance(value, str | Path) and str(value):
        return str(Path.cwd() / Path(value)) if not str(value).startswith("~") else str(value)
    return value


def _section(section: type[BaseModel], key: str) -> type[BaseModel] | None:
    annotation = section.model_fields[key].annotation if key in section.model_fields else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _optional(section: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The section type of a key that may be null; None for any other key."""
    members = get_args(section.model_fields[key].annotation) if key in section.model_fields else ()
    inner = next((one for one in members if isinstance(one, type) and issubclass(one, BaseModel)), None)
    return inner if NoneType in members else None


def _scalars(section: type[BaseModel], path: tuple[str, ...] = ()) -> Iterable[tuple[str, ...]]:
    for key, field in section.model_fields.items():
        inner = _section(section, key)
        if inner is not None:
            yield from _scalars(inner, (*path, key))
        elif "dict" not in str(field.annotation):
            yield (*path, key)


def _is_list(section: type[BaseModel], path: Sequence[str]) -> bool:
    for key in path[:-1]:
        section = _section(section, key) or section
    return Ellipsis in get_args(section.model_fields[path[-1]].annotation)


def _nearest(key: str, known: Iterable[str]) -> str | None:
    folded = {name.replace("-", "_").lower(): name for name in known}
    close = nearest(key.replace("-", "_").lower(), folded)
    return None if close is None else folded[close]


def _hint(near: str | None, path: Sequence[str]) -> str:
    if near:
        return f"; did you mean {near}?"
    where = f" of {dotted(path)}" if path else ""
    return f". The keys{where} are in the commented reference, configs/sparkd.yaml."


def _locate(tree: Table, location: Sequence[str | int]) -> tuple[tuple[str | int, ...], Location, Any]:
    """(the longest written prefix of `location`, its place, its value). pydantic appends names of union members and the like."""
    value: Any = tree
    place = Location()
    found: list[str | int] = []
    missing: str | int | None = None
    for part in location:
        if isinstance(value, Table) and part in value:
            place, value = value.places[str(part)], value[str(part)]
        elif isinstance(value, Items) and isinstance(part, int) and part < len(value):
            place, value = value.places[part], value[part]
        else:
            missing = part if isinstance(value, Table) else None
            break
        found.append(part)
    return (*found, missing) if missing is not None else tuple(found), place, None if missing is not None else value


def _is_misspelt(tree: Table, location: Sequence[str | int]) -> bool:
    holder = _locate(tree, location[:-1])[2] if len(location) > 1 else tree
    # An entry with a recipe needs no model.
    meant = {"model": {"model", "recipe"}}.get(str(location[-1]), {str(location[-1])})
    return isinstance(holder, Table) and not meant.isdisjoint(holder.meant)


def _explain(path: Sequence[str], place: Location, value: Any, sentences: Sequence[str], complete: bool) -> str:
    name = dotted(path) or "The configuration"
    if complete:
        return f"{name}: {'; '.join(sentences).rstrip('.')}."
    if sentences == [EXPECTED["extra_forbidden"]]:
        return f"{name} is not a known key: correct its spelling, or remove it."
    if sentences == [EXPECTED["missing"]]:
        return f"{name} is missing, and it is required."
    told = f"{name} is {_given(path, place, value)}; it must be {' or '.join(sentences)}."
    if not isinstance(value, str) or _is_secret(path, place):
        return told
    near = nearest(value, [word for sentence in sentences for word in _QUOTED.findall(sentence)])
    return f"{told} Did you mean {near}?" if near else told


def _is_secret(path: Sequence[str], place: Location) -> bool:
    return place.secret or not _SECRET_KEYS.isdisjoint(path)


def _given(path: Sequence[str], place: Location, value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, Mapping):
        return "a map"
    if isinstance(value, list | tuple):
        return "a list"
    if _is_secret(path, place):
        return "something else (not shown, it may be a secret)"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
