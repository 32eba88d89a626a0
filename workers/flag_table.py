"""The flags of the vLLM beside this Python, read off its own parser. Never parses a command line, never builds an engine.

A program of its own for the Python environment that has vLLM; sparkd/vllm_table.py runs it by its text, so it imports nothing of ours.
stdout gets one JSON object: {"abbreviations": whether a flag may be cut short, "flags": {spelling: {"of": the number of its argument,
"takes": 0, 1 or null where it is neither, "choices": those of its values or null, "number": "int", "float" or null, "none": whether
`None` is one of its values too}}}.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from typing import Any

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
    if action.choices is not None and kind in (str, int):
        choices = [str(one) for one in action.choices] if all(type(one) is kind for one in action.choices) else None
    number = kind.__name__ if kind in (int, float) else None
    return {"takes": takes, "choices": choices, "number": number, "none": none}


def _kind(type_: Any) -> tuple[Any, bool]:
    """(str, int, float, or None where only vLLM knows, whether `None` and nothing are taken): vLLM wraps what may be None in a function
    (engine/arg_utils.py, optional_type)."""
    if type_ is None:
        return str, False
    if type_ in (str, int, float):
        return type_, False
    if getattr(type_, "__qualname__", "").startswith("optional_type."):
        inside = [cell.cell_contents for cell in getattr(type_, "__closure__", None) or ()]
        if len(inside) == 1 and inside[0] in (int, float):
            return inside[0], True
    return None, False


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
