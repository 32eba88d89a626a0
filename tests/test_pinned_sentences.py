"""Tests compare classes, reasons, names and numbers; sparkd's wording is in tests/golden. What still pins it may only become less."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pinned_sentences import pinned, runs_of

ROOT = Path(__file__).resolve().parent.parent
# Literals of the tests with three words in a row of sparkd's own. Lower it with every test that compares facts instead.
MOST = 172
PRODUCT = 'def f(name, left_gib):\n    """Of no use here."""\n    raise E(f"The lid of {name} stays shut: {left_gib} GiB are left.")\n'


def test_no_more_sentences_are_pinned() -> None:
    known = runs_of(path.read_text() for folder in ("sparkd", "workers") for path in (ROOT / folder).rglob("*.py"))
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text[:80]!r}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, text in pinned(path.read_text(), known)
    ]

    assert len(found) <= MOST, "compare names and numbers (tests.support.facts); the wording belongs to tests/golden"


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("assert 'the lid of' in told", 1),
        ("assert told == f'The lid of {name} shut'", 1),
        ("assert 'stays shut' in told", 0),
        ("assert lacking(told, 'm', '3 GiB') == []", 0),
        ("with pytest.raises(E, match='GiB are left'): f()", 1),
        ("@pytest.mark.parametrize('told', ['The lid', 'GiB are left'])\ndef test(): ...", 1),
        ("raise E('The lid of it')", 0),
        ("assert 'of no use here' in told", 0),
    ],
)
def test_what_counts(line: str, counts: int) -> None:
    assert len(pinned(line, runs_of([PRODUCT]))) == counts
