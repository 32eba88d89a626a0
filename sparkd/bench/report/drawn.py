"""Owns what a plot is on its way into a report: the picture and the table behind it."""

from __future__ import annotations

from dataclasses import dataclass

from sparkd.bench.report.svg import Canvas


@dataclass(frozen=True)
class Drawn:
    """canvases: with the style `wide` or `narrow` where the page shows one of two, else with none."""

    title: str
    description: str
    canvases: tuple[tuple[str, Canvas], ...]
    head: list[str]
    rows: list[list[str]]

    @property
    def wide(self) -> bool:
        """Whether it takes the page's whole width."""
        return len(self.canvases) > 1
