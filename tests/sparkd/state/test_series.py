"""history.bin: what was written is read, over restarts and kills; it never grows, and a foreign file is replaced."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkd.state import series
from sparkd.state.series import COLUMNS, FILE_BYTES, KEPT_S, NAME_BYTES, Series

T0 = 1_800_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.bin"


@pytest.fixture
def kept(path: Path) -> Iterator[Series]:
    made = Series(path)
    yield made
    made.close()


def write(kept: Series, seconds: range, name: str = "a") -> None:
    for second in seconds:
        kept.write(second + 0.25, {name: float(second - T0)})


def test_the_last_seconds(kept: Series) -> None:
    write(kept, range(T0, T0 + 5))
    read = kept.read(["a", "b"], 7, T0 + 4.9)
    assert (read.step_s, read.end_s) == (1, T0 + 4)
    assert read.values == {"a": [None, None, 0.0, 1.0, 2.0, 3.0, 4.0], "b": [None] * 7}


def test_a_second_that_is_not_written_yet_is_not_shown(kept: Series) -> None:
    write(kept, range(T0, T0 + 5))
    assert kept.read(["a"], 2, T0 + 5.1).values == {"a": [3.0, 4.0]}
    assert kept.read(["a"], 2, T0 + 60).values == {"a": [None, None]}, "a daemon that was away shows that nothing came"


def test_a_gap_is_a_gap(kept: Series) -> None:
    write(kept, range(T0, T0 + 2))
    kept.write(T0 + 2, {"b": 1.0})
    write(kept, range(T0 + 3, T0 + 4))
    assert kept.read(["a"], 4, T0 + 3).values == {"a": [0.0, 1.0, None, 3.0]}


def test_half_minutes_are_means(kept: Series) -> None:
    write(kept, range(T0, T0 + 91))
    read = kept.read(["a"], 3600, T0 + 91)
    assert (read.step_s, read.end_s, len(read.values["a"])) == (30, T0 + 60, 120)
    assert read.values["a"][-3:] == [14.5, 44.5, 74.5]


def test_the_rings_go_round(kept: Series) -> None:
    write(kept, range(T0, T0 + 1000))
    values = kept.read(["a"], 900, T0 + 999).values["a"]
    assert (values[0], values[-1], None in values) == (100.0, 999.0, False)


def test_it_is_there_after_any_end(path: Path) -> None:
    first = Series(path)
    write(first, range(T0, T0 + 40))
    # Nothing is closed and nothing is flushed: this is what a kill leaves.
    again = Series(path)
    assert again.read(["a"], 3, T0 + 39).values == {"a": [37.0, 38.0, 39.0]}
    again.write(T0 + 40, {"a": 40.0})
    assert again.read(["a"], 3, T0 + 40).values == {"a": [38.0, 39.0, 40.0]}
    first.close()
    again.close()


def test_the_file_never_grows(kept: Series, path: Path) -> None:
    size, blocks = path.stat().st_size, path.stat().st_blocks
    write(kept, range(T0, T0 + 3000, 30))
    assert path.stat().st_size == size == FILE_BYTES
    assert path.stat().st_blocks == blocks, "all of it is there from the start: no full disk meets a later write"
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_series_written_longest_ago_makes_room(kept: Series) -> None:
    kept.write(T0, {"old": 1.0})
    others = {f"s{number}": float(number) for number in range(COLUMNS - 1)}
    kept.write(T0 + 1, others)
    kept.write(T0 + 2, others | {"new": 5.0})
    assert kept.read(["old", "new"], 3, T0 + 2).values == {"old": [1.0, None, None], "new": [None] * 3}, "all were in use a moment ago"
    later = int(T0 + KEPT_S)
    kept.write(later, others | {"new": 6.0})
    assert kept.read(["old", "new", "s7"], 1, later).values == {"old": [None], "new": [6.0], "s7": [7.0]}
    assert kept.read(["new"], KEPT_S, later).values["new"] == [None] * (int(KEPT_S) - 1) + [6.0], "the rows of the former are not its own"


def test_a_clock_that_was_ahead_and_is_set_back_costs_no_curve(kept: Series, path: Path) -> None:
    write(kept, range(T0 + 86_400, T0 + 86_410))
    write(kept, range(T0, T0 + 3))
    again = Series(path)
    read, read_again = kept.read(["a"], 4, T0 + 2.5).values, again.read(["a"], 4, T0 + 2.5).values
    again.close()
    assert read == read_again == {"a": [None, 0.0, 1.0, 2.0]}


@pytest.mark.parametrize(
    "content",
    [
        b"sparkd series 0\n".ljust(FILE_BYTES, b"\0"),
        b"sparkd series 1\n".ljust(FILE_BYTES - 1, b"\0"),
    ],
    ids=["another release", "cut off"],
)
def test_a_foreign_file_is_replaced(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    kept = Series(path)
    write(kept, range(T0, T0 + 2))
    assert kept.read(["a"], 2, T0 + 1).values == {"a": [0.0, 1.0]}
    assert path.stat().st_size == FILE_BYTES
    kept.close()


def test_a_name_that_is_too_long_is_left_out(kept: Series) -> None:
    longest, longer = "n" * NAME_BYTES, "n" * (NAME_BYTES + 1)
    kept.write(T0, {longest: 1.0, longer: 2.0, "not finite": float("inf")})
    assert kept.read([longest, longer, "not finite"], 1, T0).values == {longest: [1.0], longer: [None], "not finite": [None]}


def test_without_room_there_is_no_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(series.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        Series(path)
    assert not path.exists()


def test_a_write_behind_the_end_reaches_no_other_file(kept: Series, tmp_path: Path) -> None:
    """Before: the number of its descriptor was another file's by then."""
    kept.write(T0, {"a": 1.0})
    kept.close()
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    try:
        with pytest.raises(OSError):
            kept.write(T0 + 1, {"a": 2.0})
        with pytest.raises(OSError):
            kept.read(["a"], 60.0, T0 + 1)
        assert os.fstat(other).st_size == 0
    finally:
        os.close(other)
    kept.close()
