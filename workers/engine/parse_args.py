"""Command lines against the real argument parser of the vLLM beside it, in one process for all. Never builds an engine or loads a model.

`python -m workers.engine.parse_args` reads a JSON list of argument lists and writes a JSON list of what the parser says of each, null where
it takes it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

# 0.32, then 0.26.
_PARSERS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")


def parse(lines: Sequence[Sequence[str]]) -> list[str | None]:
    """The error of the installed vLLM's parser for each list of arguments, None where it takes it.

    Beside the flags themselves, what vLLM looks at only when it starts: the names of tool and reasoning parsers, of the attention backend,
    and of the fields of speculative decoding.
    """
    checks = _checks()
    return [_said(checks, line) for line in lines]


def main() -> None:
    lines = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr  # vLLM greets on stdout
    json.dump(parse(lines), out)


def _said(checks: Callable[[Sequence[str]], None], line: Sequence[str]) -> str | None:
    try:
        checks(line)
    except (Exception, SystemExit) as error:  # noqa: BLE001
        # One line must not keep the others from an answer: plugins and validators raise what they like, and --version ends.
        return " ".join(str(error).split()) or type(error).__name__
    return None


def _checks() -> Callable[[Sequence[str]], None]:
    from vllm.config import SpeculativeConfig
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    module = _first(_PARSERS)
    parser = module.make_arg_parser(Parser(prog="vllm serve"))
    fields = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    tools, reasoning = set(ToolParserManager.list_registered()), set(ReasoningParserManager.list_registered())

    def check(line: Sequence[str]) -> None:
        found: argparse.Namespace = parser.parse_args(list(line))
        module.validate_parsed_serve_args(found)
        if found.tool_call_parser and found.tool_call_parser not in tools and not found.tool_parser_plugin:
            raise ValueError(f"--tool-call-parser {found.tool_call_parser}: no such parser is registered")
        if found.reasoning_parser and found.reasoning_parser not in reasoning and not getattr(found, "reasoning_parser_plugin", None):
            raise ValueError(f"--reasoning-parser {found.reasoning_parser}: no such parser is registered")
        if unknown := sorted(set(found.speculative_config or {}) - fields):
            raise ValueError(f"--speculative-config has no field {unknown[0]}")
        backend = found.attention_backend
        if isinstance(backend, str) and backend.upper() not in ("AUTO", *AttentionBackendEnum.__members__):
            raise ValueError(f"--attention-backend {backend}: there is no such backend")

    return check


def _first(names: Sequence[str]) -> Any:
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error
    raise missing


if __name__ == "__main__":
    main()
