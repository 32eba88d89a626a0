"""The command line of every bench: a wrong argument is refused before anything starts; `--smallest` runs it once and judges no bar."""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparkd.errors import SparkdError
from workers.quantization.formats import Format


class Parser(argparse.ArgumentParser):
    """`smallest`: the arguments of the smallest run that still goes through everything, in place of what was given."""

    def __init__(self, module: str, doc: str | None, **smallest: Any) -> None:
        super().__init__(prog=f"python -m {module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._smallest = smallest
        self.add_argument("--smallest", action="store_true", help="run through everything once, as small as it goes; no bar is judged")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        given = super().parse_args(args, namespace)
        # A bench that is ended takes along what it started, as with Ctrl-C.
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
        if given.smallest:
            vars(given).update(self._smallest)
        return given

    def chosen(self, names: Iterable[str], pattern: str) -> list[str]:
        """Those of `names` that the regular expression finds; an expression that finds none ends the program."""
        every = list(names)
        matching = [name for name in every if re.search(pattern, name)]
        if not matching:
            self.error(f"argument --only: {pattern!r} matches none of: {', '.join(every)}")
        return matching


def folder(text: str) -> Path:
    """A folder that is there, absolute: children have another working folder."""
    path = Path(text).absolute()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is no folder")
    return path


def model(text: str) -> Path:
    """A folder with a model in it, absolute."""
    path = folder(text)
    if not (path / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{path} has no config.json, so no model is there")
    return path


def new(text: str) -> Path:
    """A file or folder to write, absolute; the folder that it will be in is there."""
    path = Path(text).absolute()
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {path.parent} is not there")
    return path


def pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
    return text


def formats(text: str) -> str:
    """Formats of ours with commas between."""
    try:
        for word in text.split(","):
            Format.parse(word)
    except SparkdError as error:
        raise argparse.ArgumentTypeError(error.message) from error
    return text


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def amount(text: str) -> float:
    """A number above 0; `inf` is one."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value
