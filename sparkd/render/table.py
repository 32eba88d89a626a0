"""A table on a terminal, which never cuts a name or value nor breaks it within a word."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from sparkd.render.page import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

GAP = 2
# Cells that a column of words is given at least, where its text is longer.
LEAST_WORDS = 24


class Table:
    """Rows under named columns, or under none where all names are empty.

    A terminal that is too narrow for all columns gets fewer and a line that names the rest; where that is not enough, each row becomes
    lines of names and values.
    """

    def __init__(self, *columns: str, right: Collection[str] = (), folds: Collection[str] = (), spare: Sequence[str] = ()) -> None:
        """
        right: columns of numbers.
        folds: those of words, which go on below.
        spare: those that may be left out, the first one first.
        """
        self._columns, self._right, self._folds, self._spare = columns, right, folds, spare
        self._rows: list[list[Text]] = []

    def add(self, *cells: str | Text, style: str = "") -> None:
        """One row; style: of those cells that are plain text."""
        from rich.text import Text

        self._rows.append([Text(printable(cell), style) if isinstance(cell, str) else cell for cell in cells])

    def show(self, console: Console, most: int | None = None) -> None:
        """most: cells of a line on a terminal that is wider."""
        from rich.text import Text

        room = min(console.width, most or console.width)
        for left_out in range(len(self._spare) + 1):
            shown = [index for index, name in enumerate(self._columns) if name not in self._spare[:left_out]]
            if widths := self._widths(shown, room):
                lines = self._level(console, widths)
                break
        else:
            left_out, lines = 0, self._upright(room)
        for line in lines:
            line.rstrip()
            # The terminal folds a single word that is wider than itself, and a copy of it is whole.
            console.print(line, soft_wrap=True)
        if left_out:
            note = Text(f"Not shown for lack of room: {', '.join(self._spare[:left_out])}. --json has everything.", "dim")
            for line in _filled(note.split(" "), 1, room):
                console.print(line, soft_wrap=True)

    def _widths(self, shown: Sequence[int], room: int) -> dict[int, int]:
        """Cells of each of these columns, by its place; empty where they are wider than `room` together."""
        widths, wishes = {}, {}
        for index in shown:
            lines = [line for row in self._rows for line in row[index].split()]
            words = [word.cell_len for line in lines for word in line.split(" ")]
            wishes[index] = max([len(self._columns[index]), *(line.cell_len for line in lines)])
            folded = max([len(self._columns[index]), LEAST_WORDS, *words])
            widths[index] = min(wishes[index], folded) if self._columns[index] in self._folds else wishes[index]
        left = room - sum(widths.values()) - GAP * (len(shown) - 1)
        for index in shown:
            more = max(0, min(left, wishes[index] - widths[index]))
            widths[index] += more
            left -= more
        return widths if left >= 0 else {}

    def _level(self, console: Console, widths: Mapping[int, int]) -> Iterator[Text]:
        from rich.text import Text

        heads = [[Text(name, "bold") for name in self._columns]] if any(self._columns) else []
        for row in [*heads, *self._rows]:
            cells = {index: row[index].wrap(console, width) for index, width in widths.items()}
            for number in range(max(map(len, cells.values()))):
                line = Text()
                for index, width in widths.items():
                    part = cells[index][number] if number < len(cells[index]) else Text()
                    part.rstrip()
                    part.align("right" if self._columns[index] in self._right else "left", width)
                    line.append(part).append(" " * GAP)
                yield line

    def _upright(self, room: int) -> Iterator[Text]:
        """Each row under its first cell: as many values as a line takes, each behind its name; what is not known is left out."""
        from rich.text import Text

        for first, *row in self._rows:
            yield Text.assemble(first, style="bold")
            pairs: list[Text] = []
            for name, cell in zip(self._columns[1:], row, strict=True):
                if cell.plain in ("", "-"):
                    continue
                for line in Text.assemble((f"{name} " if name else "", "dim"), cell).split():
                    pairs += [line] if line.cell_len <= room - GAP else _filled(line.split(" "), 1, room - GAP)
            yield from (Text(" " * GAP).append(line) for line in _filled(pairs, GAP, room - GAP))


def _filled(pieces: Iterable[Text], gap: int, room: int) -> list[Text]:
    """Lines of as many of the pieces as fit; one that is longer than a line stays whole."""
    lines: list[Text] = []
    for piece in pieces:
        if lines and lines[-1].cell_len + gap + piece.cell_len <= room:
            lines[-1].append(" " * gap).append(piece)
        else:
            lines.append(piece.copy())
    return lines
