"""The facts about a bench's surroundings that come from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkd.daemon.bench_surroundings import driver_of
from tests.support.daemon_process import ROOT

SPARK = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release Build  (dvs-builder@U22)\n"


@pytest.mark.parametrize(("text", "release"), [(SPARK, "580.95.05"), ("NVRM version: unknown\n", None), ("", None)])
def test_the_release_of_the_driver(tmp_path: Path, text: str, release: str | None) -> None:
    path = tmp_path / "version"
    path.write_text(text)
    assert driver_of(path) == release


def test_without_a_driver_there_is_none() -> None:
    assert driver_of(ROOT / "no-such-file") is None
