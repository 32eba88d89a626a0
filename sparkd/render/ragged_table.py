"""Owns a table of rich's whose lines end with their last letter. Never says what stands in it."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table


class Ragged(Table):
    """rich fills the last column up with blanks, which a pipe and a copied line take along."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        drawn = (part for part in super().__rich_console__(console, options) if isinstance(part, Segment))
        for line in Segment.split_lines(drawn):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                text, style, control = line[-1]
                line[-1] = Segment(text.rstrip(), style, control)
            yield from line
            yield Segment.line()
