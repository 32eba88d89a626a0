"""The options that every verb understands. Imported by each verb, so it imports neither the client nor what draws tables."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sparkd import __version__
from sparkd.errors import ConfigError

# A default of None is nothing to show.
option = partial(typer.Option, show_default=False)
argument = partial(typer.Argument, show_default=False)

Url = Annotated[str | None, option("--url", metavar="URL", help="Address of the daemon: a URL or host:port.")]
KeyFile = Annotated[Path | None, option("--key-file", metavar="FILE", help="File that holds the admin key.")]
Json = Annotated[bool, option("--json", help="Print JSON.")]
EntryFile = Annotated[Path | None, option("--config", metavar="FILE", help="The sparkd.yaml that has MODEL.")]
StateDir = Annotated[Path | None, option("--state-dir", metavar="DIR", help="Folder for state that survives a reboot.")]


class DefaultVerb(TyperGroup):
    """A group that runs its first verb where none is named: `sparkd bench MODEL` is `sparkd bench run MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # A shell that completes the line asks for the verbs.
        if not ctx.resilient_parsing and (not args or self._is_for_the_first(args[0], ctx)):
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)

    def _is_for_the_first(self, word: str, ctx: Any) -> bool:
        """Whether a word can begin the first verb's own; else it is a verb or a misspelled one."""
        if word in self.commands or word in ctx.help_option_names:
            return False
        return word.startswith("-") or any(param.required for param in next(iter(self.commands.values())).params)


def group(name: str, **more: Any) -> typer.Typer:
    """A verb with verbs below it."""
    settings = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
    return typer.Typer(name=name, rich_markup_mode=None, context_settings=settings, **more)


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """The options that every verb has; those before the verb hold unless repeated after it."""

    url: str | None = None
    key_file: Path | None = None
    json: bool = False


def options(
    ctx: typer.Context,
    url: Url = None,
    key_file: KeyFile = None,
    json: Json = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """The options before a verb, or in place of one."""
    ctx.obj = CommonOptions(url, key_file, json)
    if version:
        sys.stdout.write(f"sparkd {__version__}\n")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        sys.stdout.write(ctx.get_help() + "\n")


def key_values(pairs: Iterable[str], example: str) -> dict[str, Any]:
    """The pairs of `-o KEY=VALUE`. Values are read as YAML, so `true`, `5` and `[a, b]` are what they look like. Raises ConfigError.

    example: of a pair, for the error.
    """
    import yaml

    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][\w.-]*", name):
            raise ConfigError(f"-o {name}: KEY=VALUE is expected, such as -o {example}.")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        values[name] = text if value is None or hasattr(value, "isoformat") else value
    return values
