"""The facts about a bench's surroundings that come from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkd.daemon.bench_surroundings import UNITS, driver_of, published_of
from sparkd.recipes.library import RecipeLibrary
from tests.support.daemon_process import ROOT

SPARK = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release Build  (dvs-builder@U22)\n"


@pytest.mark.parametrize(("text", "release"), [(SPARK, "580.95.05"), ("NVRM version: unknown\n", None), ("", None)])
def test_the_release_of_the_driver(tmp_path: Path, text: str, release: str | None) -> None:
    path = tmp_path / "version"
    path.write_text(text)
    assert driver_of(path) == release


def test_without_a_driver_there_is_none() -> None:
    assert driver_of(ROOT / "no-such-file") is None


def test_the_figures_of_a_recipe_have_their_source() -> None:
    library = RecipeLibrary(None, {})
    published = published_of(library, "qwen3.6-35b-a3b-nvfp4")
    assert {figure.what for figure in published} <= UNITS.keys() and len(published) > 3
    assert all(figure.source.startswith("http") or " " in figure.source for figure in published)
    assert any(figure.to is not None for figure in published) and any(figure.when for figure in published)
    assert published_of(library, None) == published_of(library, "no-such-recipe") == ()
