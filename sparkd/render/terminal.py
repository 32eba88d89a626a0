"""Standard output line by line: with colours on a terminal. rich is imported with the first line: a plan as JSON needs none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from sparkd.render.table import Table


class Page:
    """Standard output as rich shows it. width: cells of a line."""

    def __init__(self) -> None:
        from sparkd.render.models import terminal

        self._console = terminal()
        self._rows = 0

    @property
    def is_terminal(self) -> bool:
        return self._console.is_terminal

    @property
    def width(self) -> int:
        return self._console.width

    def line(self, text: str = "", style: str = "", *, whole: bool = False) -> None:
        """One line, or more. whole: never folded, so that it can be copied."""
        self._console.print(text, style=style or None, markup=False, soft_wrap=whole)

    def pieces(self, pieces: Sequence[tuple[str, str]]) -> None:
        """One line of (text, style)."""
        from rich.text import Text

        self._console.print(Text.assemble(*pieces))

    def table(self, table: Table) -> None:
        table.show(self._console)

    @contextmanager
    def draft(self) -> Iterator[None]:
        """Erase the lines that are drawn within the block by the next `erase`."""
        self._console.record = True
        yield
        self._rows = self._console.export_text().count("\n")
        self._console.record = False

    def erase(self) -> None:
        """Lines that have left the screen stay."""
        if 0 < self._rows < self._console.height:
            self._console.file.write(f"\x1b[{self._rows}A\x1b[J")
        self._rows = 0


@contextmanager
def headers_of(source: str) -> Iterator[Callable[[int, int], None]]:
    """A line about headers that come from the hub, (read, to read). Begun only with the first: files of this machine need none."""
    with ExitStack() as shown:
        state: Mapping[str, Any] = {}

        def show(done: int, total: int) -> None:
            nonlocal state
            if not state:
                from sparkd.render.models import progress, terminal

                state = {"line": shown.enter_context(progress(terminal(stderr=True)))}
            state["line"](f"{source}: headers of {done} of {total} files", "")

        yield show
