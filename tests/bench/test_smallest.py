"""Every bench runs once, at its smallest. Its figures are not looked at."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon_process import ROOT

BENCH = Path(__file__).parent
# What a bench says, with this exit code, where the machine lacks what it needs.
CANNOT = 2
LACKS = {"hog": "no memory cgroup", "page": "chromium is missing", "products": "no GPU"}
NEEDS = {"quality": ("--model", str(ROOT / ".sparkd" / "models" / "SmolLM2-135M-Instruct"))}
BENCHES = sorted(path.stem for path in BENCH.glob("*.py") if f'Parser("tests.bench.{path.stem}"' in path.read_text(encoding="utf-8"))


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
