from __future__ import annotations

from typing import Any

import pytest

from sparkd.__main__ import exit_code
from sparkd.bench.compare import Comparison, FigureChange, compare, verdict
from sparkd.bench.figures import WAYS
from sparkd.bench.result import BenchResult, LoadRow, QualityRow
from sparkd.cli import bench as bench_commands
from tests.support.bench_example import example, metric_of

BASE = example(depths=(0,), concurrencies=(1, 2), failed=())


def with_metric(key: str, values: list[float], result: BenchResult = BASE) -> BenchResult:
    """The result with one metric of its first cell changed."""
    cells = list(result.cells)
    row = {**cells[0].rows[0], key: metric_of(values)}
    cells[0] = cells[0].model_copy(update={"rows": [row]})
    return result.model_copy(update={"cells": cells})


def change_of(comparison: Comparison, figure: str, index: int = 0) -> FigureChange:
    return [change for change in comparison.changes if change.figure == figure][index]


@pytest.mark.parametrize(
    ("key", "figure", "values", "better", "beyond"),
    [
        ("tg_throughput", "output", [80, 81, 82], False, True),
        ("tg_throughput", "output", [101, 101, 103], True, False),
        ("e2e_ttft", "first token", [80, 81, 82], True, True),
    ],
)
def test_the_direction_of_a_figure_and_its_spread(key: str, figure: str, values: list[float], better: bool, beyond: bool) -> None:
    change = change_of(compare(with_metric(key, [99, 100, 101]), with_metric(key, values)), figure)

    assert (change.better, change.beyond_spread) == (better, beyond)
    assert change.relative == pytest.approx(sum(values) / 300 - 1)


def test_the_worst_is_the_largest_share_above_the_limit() -> None:
    before = with_metric("pp_throughput", [100.0], with_metric("tg_throughput", [100.0]))
    after = with_metric("pp_throughput", [80.0], with_metric("tg_throughput", [90.0]))
    worst = compare(before, after).worst(0.05)

    assert worst is not None
    assert (worst.figure, worst.relative) == ("prompt", pytest.approx(-0.2))
    assert compare(before, after).worst(0.2) is None


def test_noise_and_throttled_cells_are_never_the_worst() -> None:
    noisy = compare(with_metric("tg_throughput", [50, 100, 150]), with_metric("tg_throughput", [40, 90, 140]))
    assert noisy.worst(0.05) is None
    assert verdict(change_of(noisy, "output")) == "~ worse"

    slow = with_metric("tg_throughput", [50.0])
    cell = slow.cells[0]
    held = cell.model_copy(update={"machine": cell.machine.model_copy(update={"throttled": ["hw_slowdown"]})})
    for distorted in (held, cell.model_copy(update={"others_tokens": 141})):
        comparison = compare(BASE, slow.model_copy(update={"cells": [distorted, *slow.cells[1:]]}))
        assert comparison.worst(0.05) is None
        assert change_of(comparison, "output").comparable is False


def test_a_cell_that_only_one_has_is_named() -> None:
    failed = example(depths=(0,), concurrencies=(1, 2), failed=((0, 2),))
    short = example(depths=(0,), concurrencies=(1,), failed=())

    assert [one.where for one in compare(BASE, failed).lost] == ["pp2048 tg128 @ d0 (c2)"]
    assert compare(BASE, short).lost == ()
    assert [one.where for one in compare(short, BASE).only_b] == ["pp2048 tg128 @ d0 (c2)"]
    assert not [change for change in compare(BASE, failed).changes if "(c2)" in change.where]


def test_the_differences_of_the_subjects_come_first() -> None:
    subject = BASE.subject.model_copy(update={"vllm": "0.33.0", "entry": {**BASE.subject.entry, "max_model_len": 4096}})
    comparison = compare(BASE, BASE.model_copy(update={"subject": subject}))

    assert [(one.what, one.a, one.b) for one in comparison.differences] == [
        ("vllm", "0.32.0", "0.33.0"),
        ("entry: max_model_len", "131072", "4096"),
    ]


def loads(**seconds: list[float]) -> dict[str, Any]:
    rows = [LoadRow(way=way, seconds=each) for way, each_of in seconds.items() for each in each_of]  # type: ignore[arg-type]
    return {"loads": rows, "quality": [], "cells": []}


def test_loads_are_compared_by_way_over_their_repetitions() -> None:
    before, after = BASE.model_copy(update=loads(first=[60, 62], swap=[30])), BASE.model_copy(update=loads(first=[80, 82], cached=[20]))
    comparison = compare(before, after)

    assert [(change.where, change.a.std, change.better) for change in comparison.changes] == [("first load", 1.0, False)]
    assert [one.where for one in comparison.only_a] == [WAYS["swap"]]
    assert [one.where for one in comparison.only_b] == [WAYS["cached"]]


def test_quality_is_compared_by_format() -> None:
    before = BASE.model_copy(update={"cells": [], "loads": [], "quality": [QualityRow(format="fp8", kl=0.0, agreement=0.9)]})
    after = before.model_copy(update={"quality": [QualityRow(format="fp8", kl=0.01, agreement=0.95)]})
    changes = {change.figure: change for change in compare(before, after).changes}

    assert (changes["KL divergence"].better, changes["KL divergence"].relative) == (False, None)
    assert changes["greedy agreement"].better is True


@pytest.mark.parametrize(("argv", "code"), [((), 0), (("--fail-over", "5%"), 4)])
def test_a_check_that_compares_nothing_fails(argv: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def result(_session: Any, name: str) -> BenchResult:
        made = example(depths=(0 if name == "a" else 4096,), concurrencies=(1,), failed=())
        return made.model_copy(update={"loads": [], "quality": []})

    monkeypatch.setattr(bench_commands, "_result", result)
    assert exit_code(["bench", "compare", "a", "b", *argv]) == code
