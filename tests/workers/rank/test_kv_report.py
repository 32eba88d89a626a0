"""The report of a KV cache: what the workers say together."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from sparkd.state.nouns import Progress
from tests.support.facts import facts
from workers.kv.report import Report
from workers.rank import kv_report
from workers.rank.kv_report import kv_path, over_nodes, read_kv, remove_kv, with_kv
from workers.rank.log_parser import Parser

GIB = 1 << 30
TOLD: dict[str, Any] = {
    "v": 1, "rank": 0, "phase": "ready", "at": 5000.0, "source": "rehearsal", "pool_bytes": 8 * GIB, "room_bytes": 12 * GIB,
    "margin_bytes": GIB, "graphs_bytes": GIB, "peak_bytes": GIB, "weights_bytes": 4 * GIB, "spare_bytes": 0, "tokens": 65536,
    "sequences": 8.5, "bytes_per_token": 131072.0, "limited_by_other_rank": False, "slack_bytes": 3 * GIB, "error_bytes": -5,
    "load_peak_bytes": GIB // 2,
}  # fmt: skip
OF_RANK: dict[str, Any] = {name: TOLD[name] for name in kv_report.BY_RANK}
READ: dict[str, Any] = {name: value for name, value in TOLD.items() if name not in ("v", "at", "limited_by_other_rank")} | {
    "why": None,
    "source_why": None,
    "peak_why": None,
    "ranks": 1,
    "by_rank": [OF_RANK],
}
REHEARSING = {"v": 1, "rank": 0, "phase": "rehearsing", "at": 4990.0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return kv_path(str(tmp_path), "m-1-0a")


def write(path: Path, rank: int = 0, **changes: Any) -> None:
    Path(f"{path}.tp{rank}" if rank else path).write_text(json.dumps(TOLD | {"rank": rank} | changes))


def test_one_rank(path: Path) -> None:
    write(path)
    assert read_kv(path) == READ


def test_what_the_worker_writes_is_read(path: Path) -> None:
    for rank in (0, 1):
        report = Report(str(path), rank)
        report.tell("rehearsing")
        report.tell("sized", **{name: value for name, value in TOLD.items() if name not in ("v", "rank", "phase", "at")})
        report.tell("ready", slack_bytes=3 * GIB, error_bytes=-5)

    read = read_kv(path)
    assert read == READ | {"ranks": 2, "why": read["why"], "by_rank": [OF_RANK, OF_RANK | {"rank": 1}]}
    assert facts(read["why"]) == "0 12.00 12.00"


def test_before_there_is_a_size(path: Path) -> None:
    path.write_text(json.dumps(REHEARSING))
    alone = dict.fromkeys(OF_RANK) | {"phase": "rehearsing", "rank": 0, "limited_by_other_rank": False}
    assert read_kv(path) == dict.fromkeys(READ) | {"phase": "rehearsing", "rank": 0, "ranks": 1, "by_rank": [alone]}


def test_the_smallest_rank_decides_and_the_report_says_why(path: Path) -> None:
    write(path, room_bytes=14 * GIB, slack_bytes=2 * GIB)
    write(path, 1, pool_bytes=6 * GIB, room_bytes=10 * GIB, tokens=49152)
    write(path, 2, room_bytes=13 * GIB)
    Path(f"{path}.tp3").write_text("{")
    write(Path(f"{path}.tp1.4711"))
    found = read_kv(path)

    assert (found["rank"], found["pool_bytes"], found["tokens"], found["ranks"]) == (1, 6 * GIB, 49152, 3)
    assert found["slack_bytes"] == 2 * GIB, "the least of all"
    assert facts(found["why"]) == "1 10.00 13.00"


def test_once_they_are_equal_it_is_the_one_that_no_other_limits(path: Path) -> None:
    write(path, limited_by_other_rank=True)
    write(path, 1, limited_by_other_rank=False, room_bytes=12 * GIB + 1)
    found = read_kv(path)

    assert found["rank"] == 1
    assert facts(found["why"]) == "1 12.00"


SOURCE_WHY = "rank 1 has no profile"


def test_over_nodes_the_smallest_rank_decides_and_every_rank_is_told(tmp_path: Path) -> None:
    nodes = []
    for rank, changes in enumerate(({}, {"room_bytes": 10 * GIB, "slack_bytes": 2 * GIB}, {"limited_by_other_rank": True})):
        path = kv_path(str(tmp_path), f"m-1-0{rank}")
        write(path, rank, pool_bytes=6 * GIB if rank else 8 * GIB, source_why=SOURCE_WHY, **changes)
        nodes.append(read_kv(path))
    found = over_nodes(nodes)

    assert (found["rank"], found["pool_bytes"], found["slack_bytes"], found["ranks"]) == (1, 6 * GIB, 2 * GIB, 3)
    assert facts(found["why"]) == "1 10.00 12.00"
    assert found["source_why"] == SOURCE_WHY
    assert [(one["rank"], one["room_bytes"]) for one in found["by_rank"]] == [(0, 12 * GIB), (1, 10 * GIB), (2, 12 * GIB)]
    assert (over_nodes([]), over_nodes(nodes[:1])) == ({}, nodes[0])


REFUSAL = "One request needs 3 GiB."


def test_a_refusal_on_another_node_is_the_models(tmp_path: Path) -> None:
    ready, refused = kv_path(str(tmp_path), "m-1-00"), kv_path(str(tmp_path), "m-1-01")
    write(ready, phase="sized")
    write(refused, 1, phase="refused", why=REFUSAL)
    found = over_nodes([read_kv(ready), read_kv(refused)])

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
    assert read_kv(path)["phase"] == phase


def test_the_first_refusal_is_the_cause(path: Path) -> None:
    write(path, phase="refused", why="the peer is gone", at=5001)
    write(path, 1, phase="refused", why=REFUSAL)
    found = read_kv(path)
    assert (found["rank"], found["why"]) == (1, REFUSAL)

    Path(f"{path}.tp1").unlink()
    write(path, phase="refused", why=None)
    unexplained = read_kv(path)
    assert unexplained["phase"] == "refused" and unexplained["why"] and REFUSAL not in unexplained["why"]


def test_a_report_that_is_cut_off_says_nothing(path: Path) -> None:
    path.write_text(json.dumps(TOLD)[:-5])
    assert read_kv(path) == {}


# Together with the log


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
    found = with_kv(log, kv)

    assert {name: value for name, value in found.items() if name in expected} == expected
    assert found["kv"] == (kv or None)


@pytest.mark.parametrize("report", [False, True])
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ([], {"pool_bytes": GIB, "bytes_per_token": 2048.0}),
        # What was logged before is then not what is there.
        (["INFO 11-21 07:00:49 [kv_cache_utils.py:2619] Overriding num_gpu_blocks=9 with num_gpu_blocks_override=5"], {}),
    ],
)
def test_of_a_cache_that_vllm_sized_the_log_says_what_is_known(
    path: Path, report: bool, override: list[str], expected: dict[str, Any]
) -> None:
    """A real one, with --gpu-memory-utilization. What it does not say stays unknown."""
    lines = Path("tests/fixtures/vllm-logs/cpu-0.32.0-single-start-serve-sigterm.txt").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if "KV cache size" in line)
    parser = Parser()
    for line in lines[:at] + override:
        parser.feed(line, 1.0)
    assert with_kv(parser.progress, {})["kv"] is None
    for line in lines[at:]:
        parser.feed(line, 1.0)
    if report:
        path.write_text(json.dumps({"v": 1, "rank": 0, "phase": "stock", "at": 5.0, "why": "this vLLM has no x"}))
    found = with_kv(parser.progress, read_kv(path))

    kv = found["kv"]
    assert kv.keys() == READ.keys()
    assert {name: value for name, value in kv.items() if value not in (None, []) and name not in ("by_rank", "why")} == {
        "phase": "stock", "rank": 0, "ranks": 1, "tokens": 524_288, "sequences": 256.0, **expected,
    }  # fmt: skip
    assert (found["kv_tokens"], found["kv_gib"]) == (524_288, 1.0 if expected else None)
    assert kv["why"] == ("this vLLM has no x" if report else None)
    assert Progress(**found).kv == kv


def test_a_small_cache_says_little_of_a_token() -> None:
    kv = with_kv({"phase": "serving", "kv_tokens": 1024, "kv_gib": 0.02, "kv_requests": None}, {})["kv"]
    assert (kv["pool_bytes"], kv["bytes_per_token"], kv["sequences"]) == (round(0.02 * GIB), None, None)


def test_nothing_is_left_of_it(path: Path) -> None:
    neighbour = kv_path(str(path.parent), "m-1-0a2")
    for file in (path, *(Path(f"{path}.{end}") for end in ("tp1", "77", "tp1.77")), neighbour):
        write(file)
    remove_kv(str(path.parent), "m-1-0a")

    assert os.listdir(path.parent) == [neighbour.name]
