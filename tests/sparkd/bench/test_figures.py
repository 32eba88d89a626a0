from __future__ import annotations

import pytest

from sparkd.bench.figures import Metric, arena_name, metric
from tests.support.bench_example import example

BASE = example(depths=(0,), concurrencies=(1,), failed=())


def test_a_metric_is_read_or_none() -> None:
    assert metric({"a": {"mean": 2, "std": 0.5, "values": [1, "x", None, 3]}}, "a") == Metric(2.0, 0.5, (1.0, 3.0))
    for row in (None, {}, {"a": None}, {"a": 3}, {"a": {"mean": True}}, {"a": {"mean": float("inf")}}):
        assert metric(row, "a") is None


@pytest.mark.parametrize(("source", "name"), [("Qwen/Qwen3", "Qwen/Qwen3"), ("/models/qwen", "m"), ("qwen", "m")])
def test_the_arena_has_the_name_of_the_hub(source: str, name: str) -> None:
    assert arena_name(BASE.subject.model_copy(update={"source": source, "model": "m"})) == name
