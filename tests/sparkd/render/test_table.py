"""A table on terminals of all widths."""

from __future__ import annotations

import io

from rich.console import Console

from sparkd.render.table import Table

ROWS = (
    ("qwen3-coder-next-80b-a3b", "READY 50%", "1,025", "the engine ended by itself, as /var/lib/sparkd/logs/qwen3.log says"),
    ("org/name with [brackets]", "-", "7", "ok"),
)


def lines_of(table: Table, width: int) -> list[str]:
    output = io.StringIO()
    table.show(Console(file=output, width=width))
    return output.getvalue().splitlines()


def filled(*, spare: tuple[str, ...] = ()) -> Table:
    table = Table("MODEL", "STATE", "TOKENS", "WHY", right={"TOKENS"}, folds={"WHY"}, spare=spare)
    for row in ROWS:
        table.add(*row)
    return table


def test_no_value_is_cut_or_broken_whatever_the_width() -> None:
    values = [value for model, state, tokens, why in ROWS for value in (model, state, tokens, *why.split()) if value != "-"]
    for width in range(30, 160):
        lines = lines_of(filled(), width)
        assert [value for value in values if not any(value in line for line in lines)] == [], width
        assert all(len(line) <= width for line in lines if "/var/lib" not in line), width
        assert all(line == line.rstrip() for line in lines)


def test_spare_columns_go_first_and_are_named() -> None:
    table = filled(spare=("WHY", "TOKENS"))

    assert lines_of(table, 160)[0].split() == ["MODEL", "STATE", "TOKENS", "WHY"]
    head, *_, note = lines_of(table, 60)
    assert head.split() == ["MODEL", "STATE", "TOKENS"]
    assert "WHY" in note and "TOKENS" not in note
    assert lines_of(table, 30)[0] == ROWS[0][0]


def test_what_an_engine_wrote_does_not_steer_the_terminal() -> None:
    table = Table("NAME")
    table.add("a\x1b[31mb")

    assert lines_of(table, 80) == ["NAME", "a[31mb"]
