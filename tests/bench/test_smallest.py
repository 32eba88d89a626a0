"""Every bench runs once, at its smallest, and refuses wrong arguments before it starts anything. Its figures are not looked at."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.daemon_process import ROOT

BENCH = Path(__file__).parent
# What a bench says, with this exit code, where the machine lacks what it needs.
CANNOT = 2
LACKS = {"hog": "no memory cgroup", "page": "chromium is missing", "products": "no GPU"}
NEEDS = {"quality": ("--model", str(ROOT / ".sparkd" / "models" / "SmolLM2-135M-Instruct"))}
BENCHES = sorted(path.stem for path in BENCH.glob("*.py") if f'Parser("tests.bench.{path.stem}"' in path.read_text(encoding="utf-8"))
WRONG = (
    ("change", "--models", "1"),
    ("chaos", "--only", "no such target"),
    ("cluster", "--only", "no such fault"),
    ("gateway", "--runs", "0"),
    ("hog",),
    ("kv", "--only", "no such start"),
    ("loader", "--only", "no such row"),
    ("mutants", "--only", "no/such/folder"),
    ("page", "--models", "1"),
    ("products", "--only", "no such kind"),
    ("quality",),
    ("soak", "--only", "no such part"),
    ("swap", "--pattern", "none"),
)


def refused(*_arguments: object, **_more: object) -> None:
    raise AssertionError("something was started")


def test_every_bench_has_a_row() -> None:
    table = (BENCH / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \| `python -m tests\.bench\.\1[^`|]*` \| [^|]+ \| [^|]+ \|$", table, re.MULTILINE)
    assert rows == BENCHES


@pytest.mark.rest
@pytest.mark.parametrize("name", BENCHES)
def test_it_runs_at_its_smallest(name: str) -> None:
    argv = [sys.executable, "-m", f"tests.bench.{name}", "--smallest", *NEEDS.get(name, ())]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, errors = process.communicate()
    finally:
        process.terminate()  # a bench that hangs takes along what it started
        process.wait()
    if name in LACKS and process.returncode == CANNOT:
        assert LACKS[name] in out
        pytest.skip(f"this machine has not what {name} needs: {LACKS[name]}")
    assert process.returncode == 0, out[-3000:] + errors[-3000:]
    assert out.strip()


@pytest.mark.rest
@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_a_wrong_argument_is_refused_before_anything_starts(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = words
    bench = import_module(f"tests.bench.{name}")
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.setattr(subprocess, "Popen", refused)
    with pytest.raises(SystemExit) as ended:
        bench.main()
    said = capsys.readouterr()
    assert ended.value.code == 2, said
    assert "error: " in said.err.splitlines()[-1]
    assert not said.out
