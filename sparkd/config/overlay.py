"""Puts environment and flags over the configuration file, and finds the place of each of pydantic's errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from sparkd.config import yaml_file
from sparkd.config.refusal import expected, reason
from sparkd.config.yaml_file import ConfigProblem, Document, Location, Map, places_in
from sparkd.errors import ConfigError
from sparkd.nearest import nearest

SHOWN_PROBLEMS = 20
_MOST_SHOWN = 128
MASK = "***"
ENV_PREFIX = "SPARKD_"
# Variables that sparkd's own command line and stub engine read; they are no keys of the file.
OTHER_ENV = ("SPARKD_CONFIG", "SPARKD_URL", "SPARKD_API_KEY", "SPARKD_ADMIN_KEY")
OTHER_ENV_FAMILY = "SPARKD_STUB_"
# Keys whose values are never printed.
_SECRET_KEYS = frozenset({"env", "keys", "extra_args"})
# llama-swap's spelling -> the path of sparkd's key.
_TOP_ALIASES: Mapping[str, yaml_file.Path] = {
    "apiKeys": ("keys", "inference"),
    "globalTTL": ("global_ttl_s",),
    "healthCheckTimeout": ("health_check_timeout_s",),
    "includeAliasesInList": ("include_aliases_in_list",),
    "logLevel": ("log_level",),
    "sendLoadingState": ("send_loading_state",),
    "unloadTimeout": ("unload_timeout_s",),
}
# llama-swap's spelling -> sparkd's key of an entry.
_ENTRY_ALIASES: Mapping[str, str] = {
    "concurrencyLimit": "concurrency_limit",
    "useModelName": "served_model_name",
    "healthCheckTimeout": "health_check_timeout_s",
    "sendLoadingState": "send_loading_state",
}
# Keys of earlier releases, with what replaces them (docs/upgrading.md).
_REPLACED: Mapping[str, str] = {
    "profile": "max_num_seqs and kv_cache",
    "profiles": "a recipe for each",
    "variants": "a recipe for each",
    "speculative": "--speculative-config in extra_args",
    "traces": "--otlp-traces-endpoint in extra_args of a model",
    "model_revision": "revision",
    "tensor_parallel_size": "tensor_parallel",
    "distributed_executor_backend": "executor",
}


def put(document: Document, path: yaml_file.Path, value: Any, place: Location) -> None:
    """Set one value of the document. path: of maps only."""
    holder = document.values
    for key in path[:-1]:
        if not isinstance(holder.get(key), Map):
            holder[key] = Map()
        holder = holder[key]
    holder[path[-1]] = value
    holder.places[path[-1]] = place


def rename_aliases(document: Document) -> None:
    """Give keys in llama-swap's spelling their own name. Both spellings of one key are a problem."""
    for alias, path in _TOP_ALIASES.items():
        _rename(document, (alias,), path)
    models = document.values.get("models")
    for name, entry in models.items() if isinstance(models, dict) else ():
        for alias, key in _ENTRY_ALIASES.items() if isinstance(entry, dict) else ():
            _rename(document, ("models", name, alias), ("models", name, key))


def _rename(document: Document, alias: yaml_file.Path, path: yaml_file.Path) -> None:
    holder, place = _written(document.values, alias[:-1])[1], document.place(alias)
    if alias[-1] not in holder:
        return
    if _written(document.values, path)[0] == path:
        problem = f"{dotted(alias)} and {dotted(path)} are one key (line {document.place(path).line}): keep one of them."
        document.problems.append(place.problem(problem, key=alias))
    put(document, path, holder.pop(alias[-1]), place)


def overlay_environ(document: Document, environ: Mapping[str, str], section: type[BaseModel]) -> None:
    """Put variables such as SPARKD_LISTEN and SPARKD_CLUSTER__ADDRESS over the file: single values of the top level and of its sections.

    An empty variable counts as not set. A SPARKD_ variable that is no key is a problem, so that a typing error is noticed, unless the file
    itself names the variable.
    """
    variables = {f"{ENV_PREFIX}{'__'.join(path).upper()}": (path, annotation) for path, annotation in _scalars(section)}
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX) or name in OTHER_ENV or name.startswith(OTHER_ENV_FAMILY) or name in document.env_names:
            continue
        if name not in variables:
            message = f"This environment variable is not a setting of sparkd{_hint(nearest(name, [*variables, *OTHER_ENV]))}"
            document.problems.append(Location(name).problem(message))
        elif value := environ[name]:
            path, annotation = variables[name]
            items = [item.strip() for item in value.split(",") if item.strip()]
            put(document, path, items if Ellipsis in get_args(annotation) else _from_here(annotation, value), Location(name))


def overlay_flags(document: Document, flags: Mapping[str, Any], section: type[BaseModel]) -> None:
    """Put flags, by dotted key, over the file. None: the flag was not given. `models` is replaced per model."""
    annotations = dict(_scalars(section))
    for key, value in flags.items():
        if value is None:
            continue
        place = Location(f"-o {key}" if "." in key else f"--{key.replace('_', '-')}")
        path = tuple(key.split("."))
        if key == "models":
            for name, entry in value.items():
                put(document, ("models", name), Map(entry), place)
        else:
            put(document, path, _from_here(annotations.get(path), value), place)


def shown(entry: Map) -> dict[str, Any]:
    """The keys of a model's entry, with MASK for each value of `env` and for each that came out of the environment."""

    def masked(value: Any, place: Location | None) -> Any:
        if isinstance(value, dict):
            return {key: masked(inner, places_in(value).get(key)) for key, inner in value.items()}
        if isinstance(value, list):
            return [masked(item, places_in(value).get(index)) for index, item in enumerate(value)]
        return MASK if place is not None and place.secret else value

    keys: dict[str, Any] = masked(entry, None)
    env = keys.get("env")
    if isinstance(env, dict | list):
        keys["env"] = {str(variable).partition("=")[0]: MASK for variable in env}
    return {key: value for key, value in keys.items() if key != "name"}


def problems_of(error: ValidationError, document: Document, section: type[BaseModel], path: yaml_file.Path = ()) -> list[ConfigProblem]:
    """pydantic's errors as problems, one for each place; the failed members of a union become one sentence.

    path: of what was validated.
    section: the type of the whole document.
    """
    wanted: dict[yaml_file.Path, list[str]] = {}
    problems: list[ConfigProblem] = []
    errors = [(each, (*path, *each["loc"])) for each in error.errors(include_url=False, include_input=False)]
    # A key that is missing because it is misspelt is named once. A stranger's map may have thousands of keys.
    unknown = [loc for each, loc in errors if each["type"] == "extra_forbidden"]
    misspelt = {(*loc[:-1], near_key(section, loc)) for loc in unknown[:SHOWN_PROBLEMS]}
    for each, loc in errors:
        written = _written(document.values, loc)[0]
        if (needed := expected(each)) is not None:
            wanted.setdefault(written, [])
            wanted[written] += [needed] if needed not in wanted[written] else []
        elif each["type"] == "extra_forbidden":
            message = unknown_key(section, loc) if loc in unknown[:SHOWN_PROBLEMS] else f"{dotted(loc)} is not a key of sparkd."
            problems.append(document.place(loc).problem(message, key=loc))
        elif each["type"] == "missing":
            if misspelt.isdisjoint({loc, (*loc[:-1], "recipe")}):
                problems.append(document.place(loc).problem(f"{dotted(loc)} is missing, and it is required.", key=loc))
        else:
            item = (*written, *([each["ctx"]["item"]] if each.get("ctx", {}).get("item") is not None else ()))
            message = f"{dotted(written) or 'The configuration'}: {reason(each).rstrip('.')}."
            problems.append(document.place(item).problem(message, key=item))
    for written, sentences in wanted.items():
        place, value = document.place(written), _written(document.values, written)[1]
        message = f"{dotted(written)} is {_given(written, place, value)}; it must be {' or '.join(sentences)}."
        if isinstance(value, str) and not _is_secret(written, place):
            near = nearest(value, [word for sentence in sentences for word in sentence.split("'")[1::2]])
            message += f" Did you mean {near}?" if near else ""
        problems.append(place.problem(message, key=written))
    return problems


def unknown_key(section: type[BaseModel], path: yaml_file.Path) -> str:
    shown = dotted(path)
    if replacement := _REPLACED.get(str(path[-1])):
        return f"{shown} is not a key of sparkd any more. Use {replacement} (docs/upgrading.md)."
    return f"{shown} is not a key of sparkd{_hint(near_key(section, path))}"


def near_key(section: type[BaseModel], path: yaml_file.Path) -> str | None:
    """The key that a misspelt one was most likely meant for."""
    inner = section_at(section, path[:-1])
    known = {name.replace("_", ""): name for name in inner.model_fields if name != "name"} if inner is not None else {}
    near = nearest(str(path[-1]).replace("-", "").replace("_", "").lower(), known)
    return None if near is None else known[near]


def section_at(section: type[BaseModel], path: yaml_file.Path) -> type[BaseModel] | None:
    """The section whose keys stand at `path`, if there is one."""
    kind: Any = section
    for part in path:
        if get_origin(kind) is dict:
            kind = get_args(kind)[1]  # part is a model's name
            continue
        kind = kind.model_fields[part].annotation if _is_section(kind) and part in kind.model_fields else None
        if get_origin(kind) is not dict:
            kind = next(filter(_is_section, (kind, *get_args(kind))), None)
    return kind if _is_section(kind) else None


def error_of(problems: Sequence[ConfigProblem], path: yaml_file.Path = ()) -> ConfigError:
    """One ConfigError that reads as a list; its file, line and key are those of the first problem.

    path: of the section from which the key is counted.
    """
    errors = in_order(problem for problem in problems if problem.severity == "error")
    first, rest = errors[0], errors[1:SHOWN_PROBLEMS]
    lines = [first.message, *map(str, rest)]
    if len(errors) > SHOWN_PROBLEMS:
        lines.append(f"... and {len(errors) - SHOWN_PROBLEMS} more problems.")
    return ConfigError("\n".join(lines), file=first.file, line=first.line, param=dotted(first.key[len(path) :]) or None)


def in_order(problems: Iterable[ConfigProblem]) -> list[ConfigProblem]:
    """The problems sorted by line; those without a line (an environment variable, a flag, a whole file) last."""
    return sorted(problems, key=lambda problem: (problem.line is None, problem.line or 0))


def dotted(path: Sequence[str | int]) -> str:
    """A path for a message. A key of a file may be any text: it is shown printable, and as long as a model's name may be."""
    return ".".join((part if part.isprintable() else ascii(part))[:_MOST_SHOWN] for part in map(str, path))


def _written(value: Any, path: yaml_file.Path) -> tuple[yaml_file.Path, Any]:
    """(the longest part of `path` that leads to a value, that value). pydantic appends names of union members and the like."""
    for index, part in enumerate(path):
        is_there = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int) and part < len(value)
        if not is_there:
            return path[:index], value
        value = value[part]
    return path, value


def _scalars(section: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The path and the type of each key that is neither a section nor a map."""
    for key, field in section.model_fields.items():
        if _is_section(field.annotation):
            yield from _scalars(field.annotation, (*path, key))  # type: ignore[arg-type]
        elif get_origin(field.annotation) is not dict:
            yield (*path, key), field.annotation


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _from_here(annotation: Any, value: Any) -> Any:
    """The value of a flag, with a relative path made absolute from the working folder; a path in the file counts from the file's folder."""
    if "Path" in str(annotation) and isinstance(value, str | Path) and str(value) and not str(value).startswith("~"):
        return str(Path.cwd() / value)
    return value


def _hint(near: str | None) -> str:
    return f"; did you mean {near}?" if near else "; see docs/configuration.md."


def _is_secret(path: yaml_file.Path, place: Location) -> bool:
    return place.secret or not _SECRET_KEYS.isdisjoint(path)


def _given(path: yaml_file.Path, place: Location, value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, Mapping | list | tuple):
        return "a map" if isinstance(value, Mapping) else "a list"
    if _is_secret(path, place):
        return "something else (not shown, it may be a secret)"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
