"""The load file: what the loader's ranks say together."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from sparkd.state.nouns import Progress
from workers.rank import load_report
from workers.rank.kv_report import with_kv
from workers.rank.load_report import load_path, read_load, remove_load, together
from workers.rank.log_parser import Parser

AT_S = 5000.0
TOLD: dict[str, Any] = {
    "v": 1, "rank": 0, "tp_rank": 0, "phase": "reading", "bytes_done": 250, "bytes_total": 1000, "units_done": 2, "units_total": 8,
    "bytes_per_s": 125.0, "eta_s": 6.0, "read_bytes": 512, "source": "checkpoint", "format": "nvfp4", "direct": True,
    "cache": {"state": "writing", "bytes": 70, "why": None}, "error": None, "at": AT_S,
}  # fmt: skip
READ: dict[str, Any] = {
    "fraction": 0.25, "bytes_done": 250, "bytes_total": 1000, "units_done": 2, "units_total": 8, "bytes_per_s": 125.0, "eta_s": 6.0,
    "read_bytes": 512, "source": "checkpoint", "format": "nvfp4", "direct": True, "cache_state": "writing", "cache_bytes": 70,
    "cache_why": None, "failure": None, "failure_at_s": None, "failure_lasts": False,
}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return load_path(str(tmp_path), "m-1-0a")


def write(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(TOLD | changes))


def test_one_rank(path: Path) -> None:
    write(path)
    assert read_load(path, AT_S + 1) == READ


def test_several_ranks_add_up_and_the_slowest_counts(path: Path) -> None:
    write(path)
    write(Path(f"{path}.tp1"), bytes_done=150, eta_s=9.5, bytes_per_s=75.0, direct=False, cache={"state": "failed", "why": "disk full"})
    write(Path(f"{path}.tp2"), phase="done", bytes_done=1000, units_done=8, bytes_per_s=300.0, eta_s=None, cache=None)
    Path(f"{path}.tp3").write_text("{")
    write(Path(f"{path}.tp1.4711"), bytes_done=9)

    assert read_load(path, AT_S) == {
        **READ, "fraction": 1400 / 3000, "bytes_done": 1400, "bytes_total": 3000, "units_done": 12, "units_total": 24, "bytes_per_s": 500.0,
        "eta_s": 9.5, "read_bytes": 1536, "direct": False, "cache_why": "disk full",
    }  # fmt: skip
    write(path, eta_s=None)
    assert read_load(path, AT_S)["eta_s"] is None, "one of them cannot say"


def test_the_first_failure_is_the_cause(path: Path) -> None:
    write(path, phase="failed", error={"message": "the peer is gone"}, at=AT_S + 1)
    write(Path(f"{path}.tp1"), phase="failed", error={"message": "NaN in a.weight", "lasting": True})
    read = read_load(path, AT_S)
    assert (read["failure"], read["failure_at_s"], read["failure_lasts"]) == ("NaN in a.weight", AT_S, True)

    Path(f"{path}.tp1").unlink()
    write(path, phase="failed", error=None)
    assert read_load(path, AT_S)["failure"] not in (None, "the peer is gone")
    write(path, phase="reading", error={"message": "not yet"})
    assert read_load(path, AT_S)["failure"] is None


def test_what_was_said_long_ago_has_no_rate_and_no_eta(path: Path) -> None:
    write(path)
    old = read_load(path, AT_S + load_report.STALE_S + 1)

    assert old == {**READ, "bytes_per_s": None, "eta_s": None}


def test_a_file_that_is_cut_off_says_nothing(path: Path) -> None:
    path.write_text(json.dumps(TOLD)[:-5])
    assert read_load(path, AT_S) == {}


def test_a_failure_is_one_short_line_whatever_names_a_checkpoint_has(path: Path) -> None:
    write(path, phase="failed", error={"message": "\x1b[31mred\n" + "m" * 9999})
    assert read_load(path, AT_S)["failure"] == "[31mred " + "m" * 492


def test_before_anything_is_known_there_is_no_fraction(path: Path) -> None:
    write(path, bytes_total=0, units_total=0)
    assert read_load(path, AT_S) == {**READ, "bytes_total": None, "units_total": None, "fraction": None}


# Together with the log


def test_the_fields_are_those_of_the_state(path: Path) -> None:
    write(path)
    told = with_kv(together(Parser().progress, read_load(path, AT_S)), {})
    assert told.keys() == {one.name for one in fields(Progress)}


@pytest.mark.parametrize(
    ("log", "load", "expected"),
    [
        ({"phase": "starting", "fraction": None, "eta_s": None}, {}, {"phase": "starting", "fraction": None, "eta_s": None}),
        ({"phase": "starting", "fraction": None, "eta_s": None}, READ, {"phase": "loading", "fraction": 0.25, "eta_s": 6.0}),
        ({"phase": "loading", "fraction": 0.9, "eta_s": 1.0}, READ, {"phase": "loading", "fraction": 0.25, "eta_s": 6.0}),
        ({"phase": "sizing", "fraction": 0.9, "eta_s": 1.0}, READ, {"phase": "sizing", "fraction": 0.9, "eta_s": 1.0}),
        ({"phase": "starting"}, {**READ, "bytes_total": None, "fraction": None}, {"phase": "starting", "fraction": None}),
        ({"phase": "warming", "bytes_total": 7}, READ, {"phase": "warming", "fraction": None, "bytes_total": 1000}),
    ],
)
def test_the_loader_says_more_than_the_log(log: dict[str, Any], load: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {name: value for name, value in together(log, load).items() if name in expected} == expected


def test_nothing_is_left_of_it(path: Path) -> None:
    neighbour = load_path(str(path.parent), "m-1-0a2")
    for file in (path, *(Path(f"{path}.{end}") for end in ("tp1", "77", "tp1.77")), neighbour):
        write(file)
    remove_load(str(path.parent), "m-1-0a")

    assert os.listdir(path.parent) == [neighbour.name]
