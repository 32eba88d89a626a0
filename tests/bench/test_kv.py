"""The KV cache bench's pure parts: the search, the order of starts, the figures and their bars."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.bench import kv
from tests.bench.kv_figures import (
    GIB,
    SOURCES,
    Figure,
    Machine,
    Start,
    best,
    figures,
    from_json,
    largest,
    schedule,
    starts_table,
    table,
    to_json,
)

MACHINE = Machine("device", True, 140 * GIB, GIB // 2, 20, "longest")
REPORT: dict[str, Any] = {"phase": "ready", "room_bytes": 30 * GIB, "pool_bytes": 28 * GIB, "graphs_bytes": GIB // 2}
REPORT |= {"margin_bytes": GIB // 2, "peak_bytes": GIB}


def start(kind: str, **more: Any) -> Start:
    known: dict[str, Any] = {"tokens": 1000, "bytes_per_token": 2**20, "process_s": 20.0, "engine_s": 10.0, "free_ready": 3 * GIB // 2}
    known |= {"free_lowest": GIB // 2, "asked": 320, "finished": 320}
    if kind in SOURCES:
        known["report"] = {**REPORT, "source": SOURCES[kind]}
    return Start("dense graphs", kind, **{**known, **more})


def told(starts: list[Start], what: str, machine: Machine = MACHINE) -> Figure:
    (found,) = [row for row in figures(starts, machine) if row.what.startswith(what)]
    return found


@pytest.mark.parametrize(
    ("edge", "guess", "most_tries"),
    [(42, 42, 2), (42, 43, 2), (42, 41, 3), (42, 47, 7), (42, 1, 14), (200, 300, 1), (200, 200, 1), (1, 1, 2), (0, 5, 4), (0, 1, 1)],
)
def test_the_search_finds_the_largest_that_passes(edge: int, guess: int, most_tries: int) -> None:
    tried: list[int] = []

    def passes(at: int) -> bool:
        tried.append(at)
        return at <= edge

    assert largest(passes, guess, 1, 200) == (edge or None)
    assert len(tried) == len(set(tried)) <= most_tries
    assert all(1 <= at <= 200 for at in tried)


def test_the_search_is_right_from_every_guess() -> None:
    for edge in range(13):
        for guess in range(15):
            assert largest(lambda at, edge=edge: at <= edge, guess, 1, 12) == (edge or None)


@pytest.mark.parametrize(
    ("starts", "reps", "kinds"),
    [
        (1, 3, "first timed"),
        (2, 1, "first timed profile"),
        (3, 1, "first timed profile profile"),
        (4, 2, "first timed profile first timed profile"),
        (5, 1, "first timed profile profile profile profile"),
        (2, 0, "profile profile"),
    ],
)
def test_so_many_starts_of_ours_and_stock_beside_them(starts: int, reps: int, kinds: str) -> None:
    assert [kind for kind, _ in schedule(starts, reps)] == kinds.split()
    assert kv.planned(["stock", "best", "starts"], starts, reps) == len(kinds.split()) + 1 + kv.SEARCH_STARTS


def test_a_best_utilization_is_one_whose_next_step_failed() -> None:
    survived, failed = start("tuned", utilization=0.285), start("tuned", utilization=0.29, failed="OutOfMemoryError: so much")
    assert best([survived]) is None
    assert best([failed, survived]) is survived
    assert best([start("tuned", utilization=1.0)]) is not None
    assert best([start("tuned", utilization=0.285, finished=3), failed]) is None


def test_tokens_are_compared_with_the_best_and_with_what_it_would_have_at_our_margin() -> None:
    edge = [start("tuned", utilization=0.285, tokens=1010, free_lowest=0), start("tuned", utilization=0.29, failed="x")]
    ours = [start("first"), start("profile", tokens=995)]
    row = told([*edge, *ours], "KV tokens")
    assert (row.measured, row.met) == ("0.985 (995 of 1,010)", False)
    # Half a GiB of margin is 512 tokens of 1 MiB.
    assert told([*edge, *ours], "the same").measured == f"{995 / (1010 - 512):.3f}"
    assert told([*edge, start("first", tokens=1005)], "KV tokens").met
    assert not [row for row in figures(ours, MACHINE) if row.what.startswith("KV tokens")]


@pytest.mark.parametrize(("free", "met"), [(1.5, True), (2.8, True), (3.0, False), (0.2, True), (0.0, False)])
def test_free_memory_is_measured_against_what_was_expected(free: float, met: bool) -> None:
    # Expected: 30 - 28 - 0.5; allowed: 1 % of 140 GiB.
    row = told([start("first"), start("profile", free_ready=int(free * GIB))], "free at READY")
    assert row.met is met
    assert f"{free - 1.5:+.2f} GiB, worst of 2" in row.measured


@pytest.mark.parametrize(
    ("more", "load", "storm"),
    [
        ({}, True, True),
        ({"finished": 319}, False, True),
        ({"failed": "OutOfMemoryError: x"}, False, True),
        ({"preempted": 321}, True, False),
    ],
)
def test_one_failure_in_any_start_is_a_failure(more: dict[str, Any], load: bool, storm: bool) -> None:
    starts = [start("first"), start("profile", **more)]
    assert told(starts, "worst-case load").met is load
    assert told(starts, "preemptions").met is storm


@pytest.mark.parametrize(
    ("more", "met"),
    [({}, True), ({"free_lowest": 60 * GIB - GIB}, True), ({"free_lowest": 50 * GIB}, False), ({"failed": "OutOfMemoryError: x"}, False)],
)
def test_a_reservation_is_kept_under_the_load(more: dict[str, Any], met: bool) -> None:
    one = start("reserved", **{"free_before": 100 * GIB, "free_lowest": 60 * GIB, "reserved": 40 * GIB, **more})
    row = told([start("first"), one], "held under the load")
    assert row.met is met
    assert row.measured.startswith(f"{(100 * GIB - one.free_lowest) / GIB:.2f} of 40.00 GiB")
    assert told([start("first", tokens=1010), one, start("tuned", utilization=1.0)], "KV tokens").met, "its cache is a smaller one"


@pytest.mark.parametrize(
    ("source", "more", "met"), [("rehearsal", {}, True), ("profile", {}, False), ("rehearsal", {"failed": "OutOfMemoryError: x"}, False)]
)
def test_after_a_setback_it_rehearses_and_serves(source: str, more: dict[str, Any], met: bool) -> None:
    one = start("setback", report={"phase": "ready", "source": source, "peak_bytes": GIB}, **more)
    assert told([start("first"), one], "after a setback").met is met


def test_a_start_in_a_pinch_has_a_profile_to_lose() -> None:
    assert kv.planned(["reserved", "setback"], 10, 3) == 3
    assert kv.planned(["starts", "reserved"], 1, 1) == kv.planned(["starts"], 1, 1) + 1


def test_times_are_ratios_of_neighbours_and_of_those_the_median() -> None:
    starts = []
    for rep, (stock, first, second) in enumerate([(20, 24, 20.2), (40, 60, 40.4), (20, 22, 30)]):
        starts += [start("timed", process_s=stock, rep=rep), start("first", process_s=first, rep=rep)]
        starts += [start("profile", process_s=second, rep=rep)]
    starts.append(start("profile", process_s=999, rep=3))
    assert told(starts, "first start").measured.startswith("1.20 (median of 3, 1.10 to 1.50")
    assert told(starts, "first start").met is True
    assert told(starts, "start from a profile").measured.startswith("1.01")


def test_a_cache_that_vllm_sized_itself_is_no_success_of_ours() -> None:
    rows = list(figures([start("first", report={"phase": "stock", "why": "this vLLM has no f"})], MACHINE))
    assert (rows[0].measured, rows[0].met) == ("0 of 1: this vLLM has no f", False)
    assert not [row for row in rows if row.what.startswith(("KV tokens", "free", "first"))]
    again = start("profile", report={**REPORT, "source": "rehearsal"})
    assert told([again], "sized").measured == "0 of 1: a start that is profile was sized by rehearsal"


def test_stock_is_to_fail_where_little_is_left() -> None:
    assert told([start("stock", utilization=0.9, failed="ValueError: Free memory")], "stock").met is True
    assert told([start("stock", utilization=0.9)], "stock").met is False


def test_records_make_the_same_table_again() -> None:
    starts = [start("first"), start("stock", utilization=0.9, failed="ValueError: Free memory")]
    again, machine = from_json(json.loads(json.dumps(to_json(starts, MACHINE))))
    assert (again, machine) == (starts, MACHINE)
    rows = list(figures(again, machine))
    assert "MISSED" not in table(rows)
    assert len(table(rows).splitlines()) == len(rows) + 1
    assert "peak 1.00, graphs 0.50" in starts_table(again)
