"""Figures over time: seconds in memory, half minutes in state.db."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkd.errors import StateError
from sparkd.state.series import SECONDS, STEP_S, STEPS, Series

T0 = 1_800_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.fixture
def kept(path: Path) -> Iterator[Series]:
    made = Series(path)
    yield made
    made.close()


def write(kept: Series, seconds: range, name: str = "a") -> None:
    for second in seconds:
        kept.write(second + 0.25, {name: float(second - T0)})


def test_the_last_seconds(kept: Series) -> None:
    assert kept.read(["a"], 2, T0).series == {"a": [None, None]}
    write(kept, range(T0, T0 + 5))
    read = kept.read(["a", "b"], 7, T0 + 4.9)
    assert (read.step_s, read.end_s) == (1, T0 + 4)
    assert read.series == {"a": [None, None, 0.0, 1.0, 2.0, 3.0, 4.0], "b": [None] * 7}


def test_a_second_that_is_not_written_yet_is_not_shown(kept: Series) -> None:
    write(kept, range(T0, T0 + 5))
    assert kept.read(["a"], 2, T0 + 5.1).series == {"a": [3.0, 4.0]}
    assert kept.read(["a"], 2, T0 + 60).series == {"a": [None, None]}, "a daemon that stood still shows that nothing came"


def test_a_gap_is_a_gap_and_a_look_that_came_late_makes_none(kept: Series) -> None:
    write(kept, range(T0, T0 + 2))
    kept.write(T0 + 2, {"b": 1.0, "a": None})
    kept.write(T0 + 3, {"a": 3.0})
    kept.write(T0 + 5, {"a": 5.0})
    kept.write(T0 + 8, {"a": 8.0})
    assert kept.read(["a"], 9, T0 + 8).series == {"a": [0.0, 1.0, None, 3.0, 5.0, 5.0, None, None, 8.0]}


def test_a_second_has_one_figure_however_many_pages_open_in_it(kept: Series) -> None:
    write(kept, range(T0, T0 + SECONDS))
    for _ in range(5):
        kept.write(T0 + SECONDS - 0.5, {"a": -1.0})
    read = kept.read(["a"], SECONDS, T0 + SECONDS - 0.5).series["a"]
    assert (read[0], read[-2:]) == (0.0, [float(SECONDS - 2), -1.0])


def test_half_minutes_are_means_and_are_there_after_any_end(kept: Series, path: Path) -> None:
    write(kept, range(T0, T0 + 91))
    again = Series(path)  # while nothing is closed: this is what a kill leaves
    for series in (kept, again):
        read = series.read(["a"], 3600, T0 + 91)
        assert (read.step_s, read.end_s, len(read.series["a"])) == (30, T0 + 60, 120)
        assert read.series["a"][-4:] == [None, 14.5, 44.5, 74.5]
    assert again.read(["a"], 3, T0 + 91).series == {"a": [None] * 3}, "seconds are in memory only"
    again.close()


def test_no_more_than_24_hours_are_kept(kept: Series, path: Path) -> None:
    for step in (0, 1, STEPS, STEPS + 1, STEPS + 2):
        kept.write(T0 + step * STEP_S, {"a": float(step)})
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT at_s FROM series").fetchall() == [(T0 + step * STEP_S,) for step in (STEPS, STEPS + 1)]
    db.close()


def test_a_clock_that_was_ahead_and_is_set_back_costs_no_curve(kept: Series) -> None:
    write(kept, range(T0 + 86_400, T0 + 86_410))
    write(kept, range(T0, T0 + 3))
    assert kept.read(["a"], 4, T0 + 2.5).series == {"a": [None, 0.0, 1.0, 2.0]}


def test_a_full_disk_costs_half_minutes_and_one_line_of_the_log(kept: Series, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept._db.execute("PRAGMA query_only=ON")
    write(kept, range(T0, T0 + 91))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    kept._db.execute("PRAGMA query_only=OFF")
    write(kept, range(T0 + 91, T0 + 121))
    assert kept.read(["a"], 901, T0 + 121).series["a"][-4:] == [None, None, None, 104.5]


def test_the_file_of_an_earlier_release_is_removed_and_that_is_said(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    former = path.with_name("history.bin")
    former.write_bytes(b"sparkd series 1\n")
    for lines in (1, 1):
        Series(path).close()
        assert len(caplog.records) == lines
    assert not former.exists() and str(former) in caplog.records[0].getMessage()


def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(StateError, match=r"state\.db"):
        Series(path)
