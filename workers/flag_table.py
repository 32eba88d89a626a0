"""The flags of the vLLM beside this Python, read off its own parser. Never parses a command line, never builds an engine.

A program of its own for the Python environment that has vLLM; sparkd/vllm_table.py runs it by its text, so it imports nothing of ours.
stdout gets one JSON object: {"abbreviations": whether a flag may be cut short, "flags": {spelling: {"of": the number of its argument,
"takes": 0, 1 or null where it is neither, "choices": those of its values or null, "number": one of NUMBERS or null, "json": one of JSON or
null, "keys": those of the JSON of a class or null, "none": whether `None` is one of its values too, "folds": whether `A-b` is read as
`a_b`}}}. JSON is a `text` that json.loads reads, one for a `class`, in which numbers may be amounts such as 80m, or one only within
`braces`. An `amount` is a whole number, 8k or 8K.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
from typing import Any

NUMBERS = ("int", "float", "amount", "amount or auto")
JSON = ("text", "class", "braces")
_NAMES = {
    "human_readable_int": "amount",
    "human_readable_int_or_auto": "amount or auto",
    "parse_dataclass": "class",
    "union_dict_and_str": "braces",
}
# 0.32, then 0.26.
PARSERS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")


def main() -> None:
    # vLLM greets on stdout, and whatever it starts would too.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump(table_of(parser_here()), out)
    out.flush()


def table_of(parser: argparse.ArgumentParser) -> dict[str, Any]:
    flags = {
        spelling: {"of": number, **_described(action)}
        for number, action in enumerate(parser._actions)
        for spelling in action.option_strings
    }
    return {"abbreviations": parser.allow_abbrev, "flags": flags}


def _described(action: argparse.Action) -> dict[str, Any]:
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
    keys = _keys(action.type) if json_ == "class" else None
    return {
        "takes": takes, "choices": choices, "number": number, "json": json_, "keys": keys, "none": none, "folds": _folds(action.type),
    }  # fmt: skip


def _optional_text(type_: Any) -> bool:
    inside = [cell.cell_contents for cell in getattr(type_, "__closure__", None) or ()]
    return getattr(type_, "__qualname__", "").startswith("optional_type.") and inside == [str]


def _folds(type_: Any) -> bool:
    """Whether `A-b` is read as `a_b` (engine/arg_utils.py, the flags of kernels)."""
    return getattr(type_, "__qualname__", "").endswith("<lambda>") and type_("A-b") == "a_b"


def _keys(type_: Any) -> list[str] | None:
    """The fields of the class that a value becomes, where it takes no others (engine/arg_utils.py, parse_dataclass; config/utils.py)."""
    inside = [cell.cell_contents for cell in getattr(type_, "__closure__", None) or ()]
    for one in (type_, *filter(callable, inside)):
        for made in getattr(one, "__defaults__", None) or ():
            if dataclasses.is_dataclass(made) and (getattr(made, "__pydantic_config__", None) or {}).get("extra") == "forbid":
                return [field.name for field in dataclasses.fields(made) if field.init]
    return None


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
