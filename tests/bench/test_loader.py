"""The loader bench's comparison of what loads hold, rank by rank."""

from __future__ import annotations

from typing import Any

from tests.bench.loader import Case, Row, comparisons


def row(case: Case, *ranks: dict[str, str]) -> Row:
    loads: list[dict[str, Any]] = [{"rank": number, "digests": found} for number, found in enumerate(ranks)]
    return Row(case, loads[::-1])


def test_loads_of_a_format_are_compared_rank_by_rank() -> None:
    same, other = {"a": "x [1] 1", "b": "x [1] 2"}, {"a": "x [1] 1", "b": "x [1] 3"}
    rows = [
        row(Case(False, "bf16"), same),
        row(Case(True, "bf16"), same),
        row(Case(True, "int4", ranks=2), same, other),
        row(Case(True, "int4", ranks=2, cache="first"), same, other),
        row(Case(True, "int4", ranks=2, cache="second"), other, same),
        Row(Case(True, "int4"), [], failed="it ended"),
        Row(Case(True, "int4", shuffled=True), [{"rank": 0}]),
    ]
    assert list(comparisons(rows)) == [
        ("ours bf16 ordered, against stock bf16 ordered: all 2 parameters and buffers", True),
        ("ours int4 ordered tp2 cache-first, against ours int4 ordered tp2: all 4 parameters and buffers", True),
        ("ours int4 ordered tp2 cache-second, against ours int4 ordered tp2: rank 0: b", False),
    ]
