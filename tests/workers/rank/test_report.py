"""The reports of a rank's processes: what its loaders and its workers say together, and with the log."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from sparkd.state.nouns import Progress
from sparkd.state.rows import noun_of
from tests.support.facts import facts
from workers.kv.report import Report
from workers.load.progress import ProgressFile
from workers.rank import report
from workers.rank.log_parser import Parser
from workers.rank.report import began_of, cache_of, load_of, over_nodes, progress_of, remove_reports, report_path

GIB = 1 << 30
AT_S = 5000.0
LOAD: dict[str, Any] = {
    "phase": "reading", "bytes_done": 250, "bytes_total": 1000, "units_done": 2, "units_total": 8, "bytes_per_s": 125.0, "eta_s": 6.0,
    "read_bytes": 512, "source": "checkpoint", "format": "nvfp4", "cache_state": "writing", "cache_bytes": 70,
    "cache_why": None, "failure": None, "failure_lasts": False, "at": AT_S,
}  # fmt: skip
LOAD_READ: dict[str, Any] = {name: value for name, value in LOAD.items() if name not in ("phase", "at")} | {
    "fraction": 0.25,
    "failure_at_s": None,
}
CACHE: dict[str, Any] = {
    "rank": 0, "phase": "ready", "at": AT_S, "source": "rehearsal", "pool_bytes": 8 * GIB, "room_bytes": 12 * GIB,
    "margin_bytes": GIB, "graphs_bytes": GIB, "peak_bytes": GIB, "weights_bytes": 4 * GIB, "spare_bytes": 0, "tokens": 65536,
    "sequences": 8.5, "bytes_per_token": 131072.0, "limited_by_other_rank": False, "slack_bytes": 3 * GIB, "error_bytes": -5,
    "load_peak_bytes": GIB // 2,
}  # fmt: skip
OF_RANK: dict[str, Any] = {name: CACHE[name] for name in report.BY_RANK}
READ: dict[str, Any] = {name: value for name, value in CACHE.items() if name not in ("at", "limited_by_other_rank")} | {
    "why": None,
    "source_why": None,
    "peak_why": None,
    "ranks": 1,
    "by_rank": [OF_RANK],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return report_path(str(tmp_path), "m-1-0a")


def write(path: Path, rank: int = 0, **changes: Any) -> None:
    """The section of a cache."""
    Path(f"{path}.tp{rank}" if rank else path).write_text(json.dumps({"cache": CACHE | {"rank": rank} | changes}))


def load(path: Path, rank: int = 0, **changes: Any) -> None:
    """The section of a load."""
    Path(f"{path}.tp{rank}" if rank else path).write_text(json.dumps({"load": LOAD | changes}))


def test_what_one_process_writes_of_both_is_read(path: Path) -> None:
    for rank in (0, 1):
        progress, cache = ProgressFile(str(path), rank), Report(str(path), rank)
        progress.begin(1000, 8, "nvfp4", "checkpoint")
        cache.tell("rehearsing")
        progress.cache("written", 35)
        cache.tell("sized", **{name: value for name, value in CACHE.items() if name not in ("rank", "phase", "at")})
        progress.done(256, True)
        cache.tell("ready", slack_bytes=3 * GIB, error_bytes=-5)

    read = cache_of(path)
    assert read == READ | {"ranks": 2, "why": read["why"], "by_rank": [OF_RANK, OF_RANK | {"rank": 1}]}
    assert facts(read["why"]) == "0 12.00 12.00"
    loaded = load_of(path, AT_S)
    assert loaded.keys() == LOAD_READ.keys()
    assert (loaded["bytes_total"], loaded["units_total"], loaded["read_bytes"]) == (2000, 16, 512)
    assert (loaded["cache_state"], loaded["cache_bytes"], loaded["format"], loaded["failure"]) == ("written", 70, "nvfp4", None)
    began_s = began_of({"began_s": {"loading": 1.0}}, path)
    assert sorted(began_s, key=began_s.__getitem__) == ["loading", "checkpoint", "rehearsing", "sized", "ready"]


def test_a_report_that_is_cut_off_says_nothing(path: Path) -> None:
    path.write_text(json.dumps({"load": LOAD, "cache": CACHE})[:-5])
    assert (load_of(path, AT_S), cache_of(path)) == ({}, {})


def test_nothing_is_left_of_it(path: Path) -> None:
    neighbour = report_path(str(path.parent), "m-1-0a2")
    for file in (path, Path(f"{path}.tp1"), path.with_name(f".{path.name}.x7"), path.with_name(f".{path.name}.tp1.x7"), neighbour):
        write(file)
    remove_reports(str(path.parent), "m-1-0a")

    assert os.listdir(path.parent) == [neighbour.name]


# The load


def test_one_load(path: Path) -> None:
    load(path)
    assert load_of(path, AT_S + 1) == LOAD_READ


def test_several_ranks_add_up_and_the_slowest_counts(path: Path) -> None:
    load(path)
    load(path, 1, bytes_done=150, eta_s=9.5, bytes_per_s=75.0, cache_state="failed", cache_bytes=0, cache_why="disk full")
    load(path, 2, phase="done", bytes_done=1000, units_done=8, bytes_per_s=300.0, eta_s=None, cache_state="none", cache_bytes=0)
    Path(f"{path}.tp3").write_text("{")
    path.with_name(f".{path.name}.tp1.x7").write_text(json.dumps({"load": LOAD | {"bytes_done": 9}}))

    assert load_of(path, AT_S) == {
        **LOAD_READ, "fraction": 1400 / 3000, "bytes_done": 1400, "bytes_total": 3000, "units_done": 12, "units_total": 24,
        "bytes_per_s": 500.0, "eta_s": 9.5, "read_bytes": 1536, "cache_why": "disk full",
    }  # fmt: skip
    load(path, eta_s=None)
    assert load_of(path, AT_S)["eta_s"] is None, "one of them cannot say"


def test_the_first_failure_is_the_cause(path: Path) -> None:
    load(path, phase="failed", failure="the peer is gone", at=AT_S + 1)
    load(path, 1, phase="failed", failure="NaN in a.weight", failure_lasts=True)
    read = load_of(path, AT_S)
    assert (read["failure"], read["failure_at_s"], read["failure_lasts"]) == ("NaN in a.weight", AT_S, True)


def test_what_was_said_long_ago_has_no_rate_and_no_eta(path: Path) -> None:
    load(path)
    old = load_of(path, AT_S + report.STALE_S + 1)

    assert old == {**LOAD_READ, "bytes_per_s": None, "eta_s": None}


def test_a_failure_is_one_short_line_whatever_names_a_checkpoint_has(path: Path) -> None:
    ProgressFile(str(path)).failed("\x1b[31mred\n" + "m" * 9999)
    assert load_of(path, AT_S)["failure"] == "[31mred " + "m" * 492


def test_before_anything_is_known_there_is_no_fraction(path: Path) -> None:
    load(path, bytes_total=0, units_total=0)
    assert load_of(path, AT_S) == {**LOAD_READ, "bytes_total": None, "units_total": None, "fraction": None}


# The KV cache


def test_one_cache(path: Path) -> None:
    write(path)
    assert cache_of(path) == READ


def test_before_there_is_a_size(path: Path) -> None:
    Report(str(path), 0).tell("rehearsing")
    alone = dict.fromkeys(OF_RANK) | {"phase": "rehearsing", "rank": 0}
    assert cache_of(path) == dict.fromkeys(READ) | {"phase": "rehearsing", "rank": 0, "ranks": 1, "by_rank": [alone]}


def test_the_smallest_rank_decides_and_the_report_says_why(path: Path) -> None:
    write(path, room_bytes=14 * GIB, slack_bytes=2 * GIB)
    write(path, 1, pool_bytes=6 * GIB, room_bytes=10 * GIB, tokens=49152)
    write(path, 2, room_bytes=13 * GIB)
    Path(f"{path}.tp3").write_text("{")
    found = cache_of(path)

    assert (found["rank"], found["pool_bytes"], found["tokens"], found["ranks"]) == (1, 6 * GIB, 49152, 3)
    assert found["slack_bytes"] == 2 * GIB, "the least of all"
    assert facts(found["why"]) == "1 10.00 13.00"


def test_once_they_are_equal_it_is_the_one_that_no_other_limits(path: Path) -> None:
    write(path, limited_by_other_rank=True)
    write(path, 1, limited_by_other_rank=False, room_bytes=12 * GIB + 1)
    found = cache_of(path)

    assert found["rank"] == 1
    assert facts(found["why"]) == "1 12.00"


SOURCE_WHY = "rank 1 has no profile"


def test_over_nodes_the_smallest_rank_decides_and_every_rank_is_told(tmp_path: Path) -> None:
    nodes = []
    for rank, changes in enumerate(({}, {"room_bytes": 10 * GIB, "slack_bytes": 2 * GIB}, {"limited_by_other_rank": True})):
        path = report_path(str(tmp_path), f"m-1-0{rank}")
        write(path, rank, pool_bytes=6 * GIB if rank else 8 * GIB, source_why=SOURCE_WHY, **changes)
        nodes.append(cache_of(path))
    found = over_nodes(nodes)

    assert (found["rank"], found["pool_bytes"], found["slack_bytes"], found["ranks"]) == (1, 6 * GIB, 2 * GIB, 3)
    assert facts(found["why"]) == "1 10.00 12.00"
    assert found["source_why"] == SOURCE_WHY
    assert [(one["rank"], one["room_bytes"]) for one in found["by_rank"]] == [(0, 12 * GIB), (1, 10 * GIB), (2, 12 * GIB)]
    assert (over_nodes([]), over_nodes(nodes[:1])) == ({}, nodes[0])


REFUSAL = "One request needs 3 GiB."


def test_a_refusal_on_another_node_is_the_models(tmp_path: Path) -> None:
    ready, refused = report_path(str(tmp_path), "m-1-00"), report_path(str(tmp_path), "m-1-01")
    write(ready, phase="sized")
    write(refused, 1, phase="refused", why=REFUSAL)
    found = over_nodes([cache_of(ready), cache_of(refused)])

    assert (found["phase"], found["rank"], found["why"]) == ("refused", 1, REFUSAL)


@pytest.mark.parametrize(
    ("phases", "phase"),
    [
        (("ready", "ready"), "ready"),
        (("sized", "rehearsing"), "rehearsing"),
        (("stock", "refused"), "refused"),
    ],
)
def test_the_last_rank_is_how_far_it_is(path: Path, phases: tuple[str, str], phase: str) -> None:
    for rank, each in enumerate(phases):
        write(path, rank, phase=each)
    assert cache_of(path)["phase"] == phase


def test_the_first_refusal_is_the_cause(path: Path) -> None:
    write(path, phase="refused", why="the peer is gone", at=5001)
    write(path, 1, phase="refused", why=REFUSAL)
    found = cache_of(path)
    assert (found["rank"], found["why"]) == (1, REFUSAL)


# Together with the log


def test_the_fields_are_those_of_the_state(path: Path) -> None:
    load(path)
    told = progress_of(Parser().progress, load_of(path, AT_S), {})
    assert told.keys() - {"kv_requests", "failure_at_s"} == {one.name for one in fields(Progress)}


@pytest.mark.parametrize(
    ("log", "loaded", "expected"),
    [
        ({"phase": "starting", "fraction": None}, {}, {"phase": "starting", "fraction": None}),
        ({"phase": "starting", "fraction": None}, LOAD_READ, {"phase": "loading", "fraction": 0.25, "eta_s": 6.0}),
        ({"phase": "loading", "fraction": 0.9}, LOAD_READ, {"phase": "loading", "fraction": 0.25, "eta_s": 6.0}),
        ({"phase": "sizing", "fraction": 0.9}, LOAD_READ, {"phase": "sizing", "fraction": 0.9, "eta_s": None}),
        ({"phase": "starting"}, {**LOAD_READ, "bytes_total": None, "fraction": None}, {"phase": "starting", "fraction": None}),
        ({"phase": "warming"}, LOAD_READ, {"phase": "warming", "fraction": None, "bytes_total": 1000}),
    ],
)
def test_the_loader_says_more_than_the_log(log: dict[str, Any], loaded: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {name: value for name, value in progress_of(log, loaded, {}).items() if name in expected} == expected


@pytest.mark.parametrize(
    ("log", "kv", "expected"),
    [
        ({"phase": "loading", "fraction": 0.9, "eta_s": 2}, {"phase": "rehearsing"}, {"phase": "sizing", "fraction": None, "eta_s": None}),
        ({"phase": "warming", "kv_tokens": None}, READ | {"phase": "sized"}, {"phase": "sizing", "kv_tokens": 65536, "kv_gib": 8.0}),
        ({"phase": "sizing", "fraction": 0.5, "kv_tokens": 7}, READ | {"phase": "sized"}, {"phase": "sizing", "fraction": 0.5}),
        ({"phase": "serving", "kv_tokens": 7, "kv_gib": 1.0}, READ, {"phase": "serving", "kv_tokens": 65536, "kv_gib": 8.0}),
        ({"phase": "warming", "kv_tokens": None}, {"phase": "stock", "tokens": None}, {"phase": "warming", "kv_tokens": None}),
    ],
)
def test_the_worker_says_more_than_the_log(log: dict[str, Any], kv: dict[str, Any], expected: dict[str, Any]) -> None:
    found = progress_of(log, {}, kv)

    assert {name: value for name, value in found.items() if name in expected} == expected
    assert found["kv"] == (kv or None)


@pytest.mark.parametrize("reported", [False, True])
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ([], {"pool_bytes": GIB, "bytes_per_token": 2048.0}),
        # The log's figures are then not those of the report.
        (["INFO 11-21 07:00:49 [kv_cache_utils.py:2619] Overriding num_gpu_blocks=9 with num_gpu_blocks_override=5"], {}),
    ],
)
def test_of_a_cache_that_vllm_sized_the_log_says_what_is_known(
    path: Path, reported: bool, override: list[str], expected: dict[str, Any]
) -> None:
    """A real one, with --gpu-memory-utilization. Figures that it does not tell stay unknown."""
    lines = Path("tests/fixtures/vllm-logs/cpu-0.32.0-single-start-serve-sigterm.txt").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if "KV cache size" in line)
    parser = Parser()
    for line in lines[:at] + override:
        parser.feed(line, 1.0)
    assert progress_of(parser.progress, {}, {})["kv"] is None
    for line in lines[at:]:
        parser.feed(line, 1.0)
    if reported:
        Report(str(path), 0).tell("stock", why="this vLLM has no x")
    found = progress_of(parser.progress, {}, cache_of(path))

    kv = found["kv"]
    assert kv.keys() == READ.keys()
    assert {name: value for name, value in kv.items() if value not in (None, []) and name not in ("by_rank", "why")} == {
        "phase": "stock", "rank": 0, "ranks": 1, "tokens": 524_288, "sequences": 256.0, **expected,
    }  # fmt: skip
    assert (found["kv_tokens"], found["kv_gib"]) == (524_288, 1.0 if expected else None)
    assert kv["why"] == ("this vLLM has no x" if reported else None)
    assert noun_of(Progress, found).kv == kv


def test_a_small_cache_says_little_of_a_token() -> None:
    kv = progress_of({"phase": "serving", "kv_tokens": 1024, "kv_gib": 0.02, "kv_requests": None}, {}, {})["kv"]
    assert (kv["pool_bytes"], kv["bytes_per_token"], kv["sequences"]) == (round(0.02 * GIB), None, None)
