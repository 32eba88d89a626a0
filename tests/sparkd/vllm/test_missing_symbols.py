"""Which of the symbols that sparkd uses a vLLM lacks, by its source: a small one, the installed one, the newest of the package index."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sparkd.__main__ import exit_code
from sparkd.cli.config_check import check
from sparkd.doctor import engine
from sparkd.vllm import missing_symbols as missing
from tests.sparkd.vllm.test_installed import environment
from tests.support.facts import lacking
from workers.vllm.symbols import TABLE, Symbol

# By what binds it, or seems to.
BOUND = {
    "function": "def function(): ...",
    "later": "async def later(): ...",
    "Class": "class Class: ...",
    "value": "value = 1",
    "second": "first, second = 1, 2",
    "typed": "typed: int = 1",
    "alias": "import os as alias",
    "taken": "from os import path as taken",
    "tried": "try:\n    from os import tried\nexcept ImportError:\n    pass",
    "caught": "try:\n    pass\nexcept ImportError:\n    caught = None",
    "chosen": "if 1:\n    pass\nelse:\n    chosen = 1",
    "starred": "from .below import *",
    "starred_from_above": "from vllm.beside import *",
    "lazy": "def __getattr__(name):\n    return {'lazy': 1}[name]",
}
UNBOUND = {
    "gone": "def here(): ...",
    "declared": "declared: int",
    "for_types": "if TYPE_CHECKING:\n    from os import for_types",
    "inside": "def function():\n    inside = 1",
    "not_lazy": "def __getattr__(name):\n    raise AttributeError(name)",
}


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in {"__init__.py": "", **files}.items():
        file = folder / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


@pytest.mark.parametrize(("name", "text", "bound"), [(*row, True) for row in BOUND.items()] + [(*row, False) for row in UNBOUND.items()])
def test_what_binds_a_name(name: str, text: str, bound: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"home/__init__.py": text, "home/below.py": "starred = 1", "beside.py": "starred_from_above = 1"}
    monkeypatch.setattr(missing, "TABLE", {name: Symbol(("vllm.none", "vllm.home"), "it ends")})
    assert missing.missing_symbols(tree(tmp_path, files)) == ({} if bound else {"it ends": [name]})


def test_each_home_counts_and_a_module_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        "old": Symbol(("vllm.new", "vllm.old"), "a"),
        "module": Symbol(("vllm.old",), "a", ""),
        "no_module": Symbol(("vllm.gone",), "a", ""),
        "part": Symbol(("vllm.old",), "b", "other.part"),
    }
    monkeypatch.setattr(missing, "TABLE", rows)
    assert missing.missing_symbols(tree(tmp_path, {"old.py": "old = 1"})) == {"a": ["no_module"], "b": ["part"]}


def test_the_installed_vllm_has_all() -> None:
    assert missing.missing_in(None) == {}
    assert [finding.verdict for finding in engine.findings("n", None)] == ["ok"]


def test_a_check_and_the_doctor_name_what_a_runtime_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    python = environment(tmp_path / "env", "vllm-0.31.0.dist-info")
    (packages,) = (tmp_path / "env" / "lib").glob("python3*/site-packages")
    tree(packages, {"engine/arg_utils.py": "class EngineArgs: ..."})
    file = tmp_path / "sparkd.yaml"
    file.write_text(f"state_dir: {tmp_path}\nengine: {{runtime: {python}}}\nmodels: {{m: {{model: o/m}}}}\n")
    messages = [problem for problem in check(file, {}) if "make_arg_parser" in problem.message]
    assert [(problem.line, problem.severity) for problem in messages] == [(2, "warning")]
    assert lacking(messages[0].message, "0.31.0", str(python), TABLE["make_arg_parser"].without) == []

    monkeypatch.setenv("SPARKD_CONFIG", str(file))
    exit_code(["doctor", "--engine"])
    printed = capsys.readouterr().out
    assert "make_arg_parser" in printed and "EngineArgs" not in printed
    assert [finding.verdict for finding in engine.findings("n", tmp_path / "none" / "python")] == ["warn"]


@pytest.mark.rest
def test_the_newest_release_of_the_package_index_has_all(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(tmp_path), "vllm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip gets no wheel of vLLM without a package index: {done.stderr.strip().splitlines()[-1:]}")
    (wheel,) = tmp_path.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path, [name for name in file.namelist() if name.startswith("vllm/") and name.endswith(".py")])
    names = [name for names in missing.missing_symbols(tmp_path).values() for name in names]
    assert names == [], wheel.name
