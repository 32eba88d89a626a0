"""The KV cache bench's pure parts: the search, the order of starts, the figures and their bars."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench.kv_figures import (
    GIB,
    SOURCES,
    Figure,
    Machine,
    Start,
    best,
    figures,
    largest,
    schedule,
    starts_table,
    table,
)

MACHINE = Machine("device", True, 140 * GIB, GIB // 2, 20)
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


def test_the_search_is_right_from_every_guess() -> None:
    for edge in range(13):
        for guess in range(15):
            tried: list[int] = []
            assert largest(lambda at, edge=edge, tried=tried: tried.append(at) or at <= edge, guess, 1, 12) == (edge or None)
            assert len(tried) == len(set(tried)) and set(tried) <= set(range(1, 13))


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


def test_every_figure_and_every_start_has_a_line() -> None:
    starts = [start("first"), start("stock", utilization=0.9, failed="ValueError: Free memory")]
    rows = list(figures(starts, MACHINE))
    assert len(table(rows).splitlines()) == len(rows) + 1
    assert len(starts_table(starts).splitlines()) == len(starts) + 1
