"""Engines in miniature, a place to run them in, and patience: what the tests of ranks share."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.processes import text_of
from tests.support.waiting import until
from workers.host.processes import RUN_DIR_VARIABLE
from workers.rank import lifecycle
from workers.rank.lifecycle import RankSpec

SECRET = "swordfish-0123456789"

# Engines in miniature. Each takes vLLM's command line, ignores it and prints "up" when its children are there.
SLEEPER = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child', flush=True); time.sleep(600)"
python = [sys.executable, "-S", "-c", code]
kin = [
    subprocess.Popen(python, stdout=subprocess.PIPE),                                             # a plain child
    subprocess.Popen(python, stdout=subprocess.PIPE, start_new_session=True),                     # in a session of its own
    subprocess.Popen(python, stdout=subprocess.PIPE, env={}),                                     # without the mark
    subprocess.Popen(["sh", "-c", '"$@" & exec cat', "sh", *python], stdout=subprocess.PIPE,
                     stdin=subprocess.PIPE, start_new_session=True),                              # a grandchild behind a shell
]
for one in kin:
    one.stdout.readline()
if os.fork() == 0:                                                                                # an orphan
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    os._exit(0)
os.wait()
print('up', flush=True)
time.sleep(600)
"""


@dataclass
class Place:
    """A short path (a socket's has 107 bytes) with a run directory, a log and a folder of engines."""

    root: Path

    @property
    def run_dir(self) -> str:
        return str(self.root / "run")

    @property
    def log(self) -> Path:
        return self.root / "log" / "r1.log"

    def spec(self, code: str = SLEEPER, **changes: Any) -> RankSpec:
        folder = self.root / "py"
        folder.mkdir(exist_ok=True)
        (folder / "engine.py").write_text(textwrap.dedent(code), encoding="utf-8")
        values: dict[str, Any] = {
            "rank_id": "r1", "model_name": "m", "served_names": ("m",), "model": "/models/m", "generation": 3, "node_id": "n1", "rank": 0,
            "runtime": sys.executable, "entrypoint": "engine", "run_dir": self.run_dir, "log_path": str(self.log), "config_hash": "c0ffee",
            "platform": "cpu", "socket_path": f"{self.run_dir}/r1.sock", "pythonpath": (str(folder),), "stop_timeout_s": 0.2,
        }  # fmt: skip
        return RankSpec(**values | changes)

    def start(self, code: str = SLEEPER, **changes: Any) -> dict[str, Any]:
        handle = lifecycle.spawn(self.spec(code, **changes))
        until(lambda: "up" in self.lines())
        return handle

    def lines(self) -> list[str]:
        return self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []

    def fact(self) -> dict[str, Any]:
        (fact,) = lifecycle.scan(self.run_dir)
        return fact

    def status(self) -> dict[str, Any]:
        return dict(json.loads(Path(self.run_dir, "r1.json").read_text(encoding="utf-8")))


def a_place() -> Iterator[Place]:
    """Made a fixture by each test module. Nothing of a rank may be left after a test."""
    root = Path(tempfile.mkdtemp(prefix="rank-"))
    here = Place(root)
    yield here
    for fact in lifecycle.scan(here.run_dir):
        lifecycle.stop({"rank_id": fact["rank_id"]}, run_dir=here.run_dir, grace_s=0)
    left = [pid for pid in psutil.pids() if f"{RUN_DIR_VARIABLE}={here.run_dir}" in text_of(pid).splitlines()]
    shutil.rmtree(root)
    assert not left


def venv(folder: Path) -> Path:
    """A virtual environment without anything, as `python -m venv` makes it in a second; its site-packages."""
    site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    site.mkdir(parents=True)
    (folder / "bin").mkdir()
    base = Path(sys._base_executable)  # type: ignore[attr-defined]
    (folder / "bin" / "python").symlink_to(base)
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    return site


def stop(place: Place, handle: dict[str, Any], grace_s: float = 10.0) -> dict[str, Any]:
    return lifecycle.stop(handle, run_dir=place.run_dir, grace_s=grace_s)
