"""Standard output line by line: with colours on a terminal, plain in a pipe.

Importing rich and laying out the tables of a plan with it takes a sixth of the time of `sparkd plan` of the largest checkpoints, so a pipe
does without.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from sparkd.render.page import Columns, Page, PlainText

if TYPE_CHECKING:
    from rich.console import Console

# Make rich write colours into a pipe too (rich/console.py, Console.is_terminal).
COLOURED = ("FORCE_COLOR", "TTY_COMPATIBLE")


class Styled:
    """As rich shows it."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @property
    def width(self) -> int:
        return self._console.width

    def line(self, text: str = "", style: str = "", *, whole: bool = False) -> None:
        self._console.print(text, style=style or None, markup=False, soft_wrap=whole)

    def pieces(self, pieces: Sequence[tuple[str, str]]) -> None:
        from rich.text import Text

        self._console.print(Text.assemble(*pieces))

    def columns(self, table: Columns) -> None:
        from rich.text import Text

        from sparkd.render.ragged_table import Ragged

        made = Ragged(box=None, pad_edge=False, header_style="bold")
        for name in table.names:
            made.add_column(name, justify="right" if name in table.right else "left", no_wrap=True)
        for cells, style in table.rows:
            made.add_row(*map(Text, cells), style=style or None)
        self._console.print(made)


def standard() -> Page:
    """Standard output."""
    if not sys.stdout.isatty() and not any(os.environ.get(name) for name in COLOURED):
        return PlainText()
    from sparkd.render.models import terminal

    return Styled(terminal())


@contextmanager
def headers_of(source: str) -> Iterator[Callable[[int, int], None]]:
    """A line about headers that come from the hub, (read, to read). Begun only with the first: files of this machine need none."""
    with ExitStack() as shown:
        known: Mapping[str, Any] = {}

        def told(done: int, total: int) -> None:
            nonlocal known
            if not known:
                from sparkd.render.models import progress, terminal

                known = {"line": shown.enter_context(progress(terminal(stderr=True)))}
            known["line"](f"{source}: headers of {done} of {total} files", "")

        yield told
