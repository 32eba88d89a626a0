"""The figures of the KV cache bench and their bars."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench.kv_figures import GIB, SOURCES, Figure, Start, figures

TOTAL = 140 * GIB
REPORT: dict[str, Any] = {"phase": "ready", "room_bytes": 30 * GIB, "pool_bytes": 28 * GIB, "graphs_bytes": GIB // 2}
REPORT |= {"margin_bytes": GIB // 2, "peak_bytes": GIB}


def start(kind: str, **more: Any) -> Start:
    known: dict[str, Any] = {"tokens": 1000, "process_s": 20.0, "engine_s": 10.0, "free_ready": 3 * GIB // 2}
    known |= {"free_lowest": GIB // 2, "asked": 320, "finished": 320}
    if kind in SOURCES:
        known["report"] = {**REPORT, "source": SOURCES[kind]}
    return Start("dense graphs", kind, **{**known, **more})


def told(starts: list[Start], what: str) -> Figure:
    (found,) = [row for row in figures(starts, TOTAL) if row.what.startswith(what)]
    return found


@pytest.mark.parametrize(("free", "met"), [(2.8, True), (3.0, False), (0.2, True), (0.0, False)])
def test_free_memory_is_measured_against_what_was_expected(free: float, met: bool) -> None:
    # Expected: 30 - 28 - 0.5; allowed: 1 % of 140 GiB.
    row = told([start("first"), start("profile", free_ready=int(free * GIB))], "free at READY")
    assert row.met is met


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
    assert told([start("first"), one], "held under the load").met is met


def test_times_are_medians_beside_stocks() -> None:
    starts = [start("stock", process_s=seconds) for seconds in (18, 20, 40)]
    starts += [start("first", process_s=seconds) for seconds in (20, 24, 60)]
    starts += [start("profile", process_s=20.2), start("profile", process_s=9, report={"phase": "ready", "source": "rehearsal"})]
    assert told(starts, "first start").measured == "1.20"
    assert told(starts, "start from a profile").measured == "1.01"
    assert not told(starts, "sized by").met
