"""Every bench runs once, at its smallest, and refuses wrong arguments before it starts anything. Its figures are not looked at.

Those that take half a minute or more, most of which load models into real engines, run under `make smoke` alone.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.daemon_process import ROOT

BENCH = Path(__file__).parent
LIMIT_S, END_S = 300, 90
# What a bench says, with this exit code, where the machine lacks what it needs.
CANNOT = 2
LACKS = {"hog": "no memory cgroup", "page": "chromium is missing", "products": "no GPU"}
# The arguments that a bench needs besides --smallest; FOLDER is an empty folder.
RUNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "activations": ((),),
    "answers": ((),),
    "architectures": ((),),
    "best": ((),),
    "change": ((),),
    "chaos": ((),),
    "cluster": ((),),
    "disk": (("FOLDER",),),
    "footprint": ((), ("--published",)),
    "formats": ((),),
    "gateway": ((),),
    "headers": ((),),
    "hog": ((),),
    "kv": ((),),
    "live": ((),),
    "loader": ((),),
    "page": ((),),
    "products": ((),),
    "ranks": ((),),
    "shape": ((),),
    "slope": ((),),
    "soak": ((),),
    "swap": ((),),
    "team": ((),),
}
# Half a minute or more each, on two cores: `make smoke`.
SLOW = {"activations", "architectures", "change", "cluster", "footprint", "headers", "hog", "kv", "loader", "ranks", "soak", "team"}
# Programs that a bench starts, by themselves no bench.
PARTS = {
    "footprint_case",
    "gateway_target",
    "kv_ballast",
    "kv_case",
    "live_target",
    "load",
    "loader_case",
    "quality",
    "sampling",
    "speak_case",
}
WRONG = (
    ("activations", "--only", "no such kernels"),
    ("answers", "--only", "no such model"),
    ("answers", "--platform", "tpu"),
    ("architectures", "--only", "no such architecture"),
    ("architectures", "--jobs", "0"),
    ("best", "--model", "no/such/folder"),
    ("chaos", "--model", "no/such/folder"),
    ("chaos", "--only", "no such target"),
    ("chaos", "--faults", "0"),
    ("chaos", "--json", "no/such/folder/file"),
    ("cluster", "--only", "no such fault"),
    ("cluster", "--json", "no/such/folder/file"),
    ("disk", "no/such/folder"),
    ("footprint", "--published", "--only", "no such model"),
    ("footprint", "--limit-s", "nan"),
    ("formats", "--only", "no such format"),
    ("formats", "--only", "("),
    ("gateway", "--pid", "1"),
    ("headers", "--rounds", "-1"),
    ("hog",),
    ("hog", "--model", "no/such/folder"),
    ("kv", "--only", "no such step"),
    ("kv", "--model", "no/such/folder"),
    ("live", "--pages", "0"),
    ("live", "--models", "1"),
    ("page", "--changes", "0"),
    ("page", "--models", "1"),
    ("products", "--only", "no such kind"),
    ("loader", "--only", "no such row"),
    ("loader", "--quality"),
    ("loader", "--quality", "--model", "no/such/folder"),
    ("ranks", "--shapes", "two"),
    ("ranks", "--quantize", "no-such-format"),
    ("slope", "--requests", "many"),
    ("soak", "--aborts", "0"),
    ("soak", "--only", "no such part"),
)


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A bench that takes too long is asked to end, so that it takes along what it started."""
    argv = [sys.executable, "-m", f"tests.bench.{name}", *arguments]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, errors = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            out, errors = process.communicate(timeout=END_S)
            pytest.fail(f"{name} took longer than {LIMIT_S} s: {out[-2000:]}{errors[-2000:]}")
    return subprocess.CompletedProcess(argv, process.returncode, out, errors)


def refused(*_arguments: object, **_more: object) -> None:
    raise AssertionError("something was started")


def programs(folder: Path) -> set[str]:
    """The modules of a folder that can be run."""
    paths = [path for path in folder.rglob("*.py") if re.search(r"^(if __name__ ==|def main\(\))", path.read_text(), re.MULTILINE)]
    return {".".join(path.relative_to(folder).with_suffix("").parts) for path in paths}


def test_every_bench_is_run() -> None:
    assert programs(BENCH) == RUNS.keys() | PARTS
    assert RUNS.keys() > SLOW


@pytest.mark.parametrize("text", ["def main() -> int:\n    return 0\n", "print()\nif __name__ == '__main__':\n    pass\n"])
def test_a_new_bench_is_seen(text: str, tmp_path: Path) -> None:
    (tmp_path / "further").mkdir()
    for name in ("new.py", "further/newer.py"):
        (tmp_path / name).write_text(text)
    (tmp_path / "part.py").write_text("def main(model: str) -> int:\n    return 0\n")
    assert programs(tmp_path) == {"new", "further.newer"}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param(name, arguments, marks=[pytest.mark.slow] if name in SLOW and not arguments else [])
        for name, runs in RUNS.items()
        for arguments in runs
    ],
)
@pytest.mark.timeout(LIMIT_S + END_S + 30)
def test_it_runs_at_its_smallest(name: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run(name, "--smallest", *(str(tmp_path) if word == "FOLDER" else word for word in arguments))
    if name in LACKS and done.returncode == CANNOT:
        assert LACKS[name] in done.stdout
        return
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.strip()


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_a_wrong_argument_is_refused_before_anything_starts(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = words
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.setattr(subprocess, "Popen", refused)
    with pytest.raises(SystemExit) as ended:
        import_module(f"tests.bench.{name}").main()
    told = capsys.readouterr()
    assert ended.value.code == 2, told
    assert "error: " in told.err.splitlines()[-1]
    assert not told.out
