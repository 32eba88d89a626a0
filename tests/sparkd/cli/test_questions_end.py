"""Every way in which a question to vLLM ends early: what asked it leaves no process and no file behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sparkd.vllm.ask.test_model import Engine
from tests.support.checkpoints import dense, write
from tests.support.daemon_process import ROOT
from tests.support.processes import alive
from tests.support.published_tensors import tensors_of
from tests.support.waiting import until


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """One that never answers, for the only model of a configuration."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    engine = Engine(tmp_path)
    engine.says(own=["wait"], spark=["wait"])
    shape = dense()
    entry = {"model": str(write(tmp_path / "m", shape, tensors_of(shape))), "runtime": str(engine.python), "max_model_len": 512}
    (tmp_path / "sparkd.yaml").write_text(json.dumps({"state_dir": str(tmp_path / "state"), "models": {"m": entry}}))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    # A command that was started by nohup outlives SIGHUP, and so would those of these tests.
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield engine
    signal.signal(signal.SIGHUP, ignored)
    if is_asked(engine):
        os.kill(pid_of(engine), signal.SIGKILL)


def pid_of(engine: Engine) -> int:
    return int((engine.root / "pid").read_text() or 0)


def is_asked(engine: Engine) -> bool:
    """Whether the child that is asked is there."""
    try:
        return alive(pid_of(engine))
    except (OSError, ValueError):
        return False


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (["plan", "m"], signal.SIGINT),
        (["plan", "m"], signal.SIGTERM),
        pytest.param(["plan", "m"], signal.SIGHUP, marks=pytest.mark.rest),
    ],
)
def test_a_command_that_is_interrupted_leaves_nothing(engine: Engine, words: list[str], number: int) -> None:
    file = str(engine.root / "sparkd.yaml")
    command = [sys.executable, "-P", "-m", "sparkd", *words, "--config", file]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SPARKD_URL": "http://127.0.0.1:1"}
    with subprocess.Popen(command, env=environment, start_new_session=True, text=True, **quiet) as asking:  # type: ignore[call-overload]
        until(lambda: is_asked(engine) or asking.poll() is not None, "the question", 0.02)
        assert list((engine.root / "tmp").iterdir()) and asking.poll() is None
        asking.send_signal(number)
        _, errors = asking.communicate()
    assert asking.returncode == 128 + number and "Traceback" not in errors
    assert not list((engine.root / "tmp").iterdir())
    until(lambda: not is_asked(engine), "its end", 0.02)
