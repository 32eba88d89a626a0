"""Command lines against the parser of the vLLM beside this Python, in one process for all. Never builds an engine.

stdin gets {"lines": [[argument, ..], ..]}. stdout gets a line with {"vllm": its version, "refused": [[{"flag", "reason"}, ..] for each
line]}. flag: as it is written, without its value; "" where none is at fault. reason: vLLM's words, without what the arguments say.

A flag is written in full: one that vLLM would complete is refused with the names that it may mean.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from workers.vllm.symbols import release, symbol

# As argparse calls it.
UNRECOGNIZED = "unrecognized argument"
# A shorter value is no secret, and its characters stand in other words of the sentence.
_LEAST_CHARS = 3
_MOST_CHARS = 300
_MOST_NEAR = 3


class _Refused(Exception):
    def __init__(self, *refusals: tuple[str, str]) -> None:
        """refusals: (flag, reason)."""
        self.refusals = refusals


def parse(lines: Sequence[Sequence[str]]) -> list[list[dict[str, str]]]:
    """The refusals of the installed vLLM for each list of arguments, in the module docstring's format."""
    parser = parser_here()
    return [[{"flag": flag, "reason": _without_values(reason, line)} for flag, reason in _refusals(parser, line)] for line in lines]


def main() -> None:
    # vLLM greets on stdout, and whatever it starts would too.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    refused = parse(json.load(sys.stdin)["lines"])
    print(json.dumps({"vllm": release(), "refused": refused}), file=out, flush=True)


def parser_here() -> Any:
    """The parser of `vllm serve`; where it refuses, it raises. Raises MissingSymbol."""

    class Parser(symbol("FlexibleArgumentParser")):  # type: ignore[misc]
        def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
            given, rest = super().parse_known_args(args, namespace)
            flags = [word.partition("=")[0] for word in rest if word.startswith("-")]
            if flags:
                raise _Refused(*((flag, self._unknown(flag)) for flag in flags))
            if rest:
                before = [word for word in args[: args.index(rest[0])] if word.startswith("-")]
                raise _Refused(("".join(before[-1:]).partition("=")[0], f"there is an {UNRECOGNIZED} behind it"))
            return given, rest

        def _unknown(self, flag: str) -> str:
            names = [name for name in self._option_string_actions if name.startswith("--")]
            meant = [name for name in names if name.startswith(flag)] if flag.startswith("--") else []
            meant = meant or difflib.get_close_matches(flag, names, _MOST_NEAR)
            return f"{UNRECOGNIZED}; did you mean {' or '.join(meant[:_MOST_NEAR])}?" if meant else UNRECOGNIZED

        def error(self, message: str) -> NoReturn:
            fault = sys.exc_info()[1]
            names = getattr(fault, "argument_name", None) or "".join(re.findall(r"--[\w-]+", message)[:1])
            name = next((each for each in names.split("/") if each.startswith("--")), names)
            raise _Refused((name, _reason(fault, getattr(fault, "message", message))))

    return symbol("make_arg_parser")(Parser(prog="vllm serve", allow_abbrev=False))


def _refusals(parser: Any, line: Sequence[str]) -> Sequence[tuple[str, str]]:
    try:
        return [*_unregistered(parser.parse_args(["model", *line]))]
    except _Refused as refused:
        return refused.refusals
    except (Exception, SystemExit) as error:  # noqa: BLE001
        # One line must not keep the others from an answer: plugins and validators raise what they like, and --version ends.
        return [("", type(error).__name__)]


def _unregistered(given: Any) -> Iterator[tuple[str, str]]:
    """A refusal for each parser of tool calls and of reasoning that this vLLM lacks, which its server refuses too
    (entrypoints/launchers/launcher.py, validate_api_server_args)."""
    for name, manager, plugin in (
        ("tool_call_parser", "ToolParserManager", given.tool_parser_plugin),
        ("reasoning_parser", "ReasoningParserManager", given.reasoning_parser_plugin),
    ):
        value, known = getattr(given, name, None), symbol(manager).list_registered()
        if value and not plugin and value not in known:
            near = difflib.get_close_matches(value, known, 1)
            yield f"--{name.replace('_', '-')}", "there is no such parser" + (f"; did you mean {near[0]}?" if near else "")


def _reason(fault: BaseException | None, message: str) -> str:
    """The message, or that of the JSON's reader behind it, which names the place."""
    while fault is not None:
        if isinstance(fault, json.JSONDecodeError):
            return f"invalid JSON: {fault}"
        if hasattr(fault, "errors"):  # pydantic's ValidationError
            first = fault.errors(include_url=False)[0]
            return ": ".join([*filter(None, [".".join(map(str, first["loc"]))]), first["msg"]])
        fault = fault.__cause__ or fault.__context__
    return message


def _without_values(text: str, line: Sequence[str]) -> str:
    """A value may be a secret."""
    values = {value for arg in line for value in _values(arg.partition("=")[2] if arg.startswith("-") else arg)}
    for value in sorted(values, key=len, reverse=True):
        for shown in (value, repr(value)[1:-1], json.dumps(value)[1:-1]) if len(value) >= _LEAST_CHARS else ():
            text = re.sub(rf"(?<!\w){re.escape(shown)}(?!\w)", "...", text, flags=re.IGNORECASE)
    return " ".join(text.split())[:_MOST_CHARS]


def _values(text: str) -> Iterator[str]:
    """The text, and the parts of a list or of JSON in it; of a map not the keys, which a sentence needs."""
    yield from (text, *text.split(","))
    with contextlib.suppress(ValueError, RecursionError):
        open_ = [json.loads(text)]
        while open_:
            part = open_.pop()
            if isinstance(part, dict | list):
                open_ += part.values() if isinstance(part, dict) else part
            else:
                yield str(part)


if __name__ == "__main__":
    main()
