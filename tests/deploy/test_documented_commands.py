"""Every `sparkd ...` that a document or a message names is one that the command line takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from sparkd.__main__ import command_line
from sparkd.cli.options import DefaultVerb

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "deploy").glob("*.md"))]
MESSAGES = sorted((ROOT / "sparkd").rglob("*.py"))
USAGE_ERROR: Any = typer.BadParameter.__mro__[2]
COMMAND_LINE: Any = get_command(command_line())


def commands_of(text: str) -> Iterator[str]:
    """Code spans and lines of code blocks that begin with `sparkd`, or with `sudo` and another program in front of it.

    A block that follows another at once is what that one prints.
    """
    text = re.sub(r"(?<=^```\n\n)```\n.*?```", "", text, flags=re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines = [line.partition("  #")[0] for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    for each in [*spans, *lines]:
        for command in re.split(r"&&|;|\|\s", each.replace(r"\|", "|")):
            if found := re.match(r"(?:\$ )?(?:ssh \S+ )?(?:sudo )?(?:\S*/bin/)?sparkd (?P<words>[a-z-].*)", command.strip()):
                yield found["words"]


def complaint(text: str) -> str | None:
    """What the real parser says about verb, options and number of arguments; too few of them are a mention."""
    words = [word for word in shlex.split(re.sub(r"[\[\]]|\.\.\.", " ", text)) if word != "-h"]
    command, ctx = COMMAND_LINE, COMMAND_LINE.context_class(COMMAND_LINE, info_name="sparkd")
    while words and (verbs := getattr(command, "commands", None)):
        if words[0] in verbs:
            verb, *words = words
        elif isinstance(command, DefaultVerb):
            verb = next(iter(verbs))
        else:
            break
        command = verbs[verb]
        ctx = command.context_class(command, info_name=verb, parent=ctx)
    try:
        _, rest, _ = command.make_parser(ctx).parse_args(words)
    except USAGE_ERROR as error:
        return None if str(error).endswith("requires an argument.") else str(error) or repr(error)
    return f"unexpected {' '.join(rest)}" if rest else None


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda path: path.name)
def test_a_command_of_a_document_is_taken(file: Path) -> None:
    assert {command: wrong for command in commands_of(file.read_text()) if (wrong := complaint(command))} == {}


def test_a_command_of_a_message_is_taken() -> None:
    named = {command for file in MESSAGES for command in commands_of(file.read_text()) if "{" not in command}

    assert len(named) > 50
    assert {command: wrong for command in named if (wrong := complaint(command))} == {}


@pytest.mark.parametrize("command", ["reload MODEL", "nope", "ps --nope", "load A B", "requests --nope", "bench compare A B C"])
def test_a_wrong_one_is_found(command: str) -> None:
    assert complaint(command)
