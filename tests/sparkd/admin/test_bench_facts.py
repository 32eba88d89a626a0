"""The facts about a benched model that come from files, and what its result teaches the next plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparkd.admin.bench_facts import UNITS, check_lendable, driver_of, published_of, rates_of
from sparkd.bench.figures import answer_metric
from sparkd.bench.result import EngineFigures, LoadRow, Phase, Predicted
from sparkd.checkpoint import bounded_read
from sparkd.checkpoint.remote_headers import checkpoint_at
from sparkd.config.config import Config
from sparkd.config.model import ModelConfig
from sparkd.control.registry import Registry
from sparkd.recipes.library import RecipeLibrary
from tests.support.bench_example import example

SPARK = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release Build  (dvs-builder@U22)\n"


@pytest.mark.parametrize(("text", "release"), [(SPARK, "580.95.05"), ("NVRM version: unknown\n", None), ("", None)])
def test_the_release_of_the_driver(tmp_path: Path, text: str, release: str | None) -> None:
    path = tmp_path / "version"
    path.write_text(text)
    assert driver_of(path) == release


def test_a_checkpoint_on_a_hub_is_looked_at_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    apart: list[tuple[Any, ...]] = []

    def called(read: Callable[..., Any], *arguments: Any, time_s: float) -> Any:
        apart.append((read, *arguments))
        return SimpleNamespace(quantization=None)

    monkeypatch.setattr(bounded_read, "call", called)
    spec = ModelConfig(name="m", model="owner/name", env={"HF_HOME": "/cache"})
    registry = SimpleNamespace(config=Config(), spec=lambda _: spec)

    check_lendable(cast(Registry, registry), "m")

    ((read, source, revision, environ),) = apart
    assert (read, source, revision, environ["HF_HOME"]) == (checkpoint_at, "owner/name", None, "/cache")


def test_the_figures_of_a_recipe_have_their_source() -> None:
    library = RecipeLibrary(None, {})
    published = published_of(library, "qwen3.6-35b-a3b-nvfp4")
    assert {figure.what for figure in published} <= UNITS.keys() and len(published) > 3
    assert all(figure.source.startswith("http") or " " in figure.source for figure in published)
    assert any(figure.to is not None for figure in published) and any(figure.when for figure in published)
    assert published_of(library, None) == published_of(library, "no-such-recipe") == ()


def test_a_bench_shows_the_rate_of_the_memory_only_where_each_token_reads_the_weights() -> None:
    result = example(depths=(0,)).model_copy(update={"predicted": Predicted(active_bytes=1 << 30), "loads": []})
    result = result.model_copy(update={"subject": result.subject.model_copy(update={"nodes": ["a"]})})
    decode = answer_metric(result.cells[0], "tg_throughput")
    plain = result.cells[0].model_copy(update={"engine": EngineFigures()})
    drafted = result.cells[0].model_copy(update={"engine": EngineFigures(drafted_tokens=5)})
    two_nodes = result.subject.model_copy(update={"nodes": ["a", "b"]})

    assert decode is not None
    assert rates_of(result.model_copy(update={"cells": [plain]})) == {"bandwidth_bytes_s": (1 << 30) * decode.mean}
    assert rates_of(result.model_copy(update={"cells": [drafted]})) == {}
    assert rates_of(result.model_copy(update={"cells": [plain], "subject": two_nodes})) == {}
    assert rates_of(result.model_copy(update={"cells": [plain], "predicted": None})) == {}
    small = Predicted(active_bytes=(1 << 30) - 1)
    assert rates_of(result.model_copy(update={"cells": [plain], "predicted": small})) == {}, "most of a step is something else"


def test_loads_show_the_rate_of_the_disk() -> None:
    def cached(rate: float, size: int) -> LoadRow:
        return LoadRow(way="cached", seconds=9, bytes_per_s=rate, phases=[Phase(phase="read", seconds=1, bytes=size)])

    loads = [cached(rate, 1 << 30) for rate in (1e9, 3e9, 2e9)] + [cached(3e7, 1 << 27)] * 4
    loads += [LoadRow(way="first", seconds=9, bytes_per_s=5e9, phases=[Phase(phase="quantize", seconds=1)])] * 5
    result = example().model_copy(update={"cells": [], "loads": loads})
    result = result.model_copy(update={"subject": result.subject.model_copy(update={"nodes": ["a"]})})
    assert rates_of(result) == {"disk_bytes_s": 2e9}
