"""A real `sparkd serve` in a process of its own, and everything a test asks or does to it. Never fakes any part of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from sparkd.config.config import load_config
from tests.support.processes import alive, command_of, text_of
from tests.support.waiting import HUNG_S, until

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class DaemonProcess:
    """`settings` is the content of sparkd.yaml without listen and state_dir. program: the module that is run for sparkd, one that has the
    machine to itself. root: the folder with its packages."""

    program = "tests.support.lone_sparkd"
    root = ROOT

    def __init__(self, folder: Path, settings: dict[str, Any], environ: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.config = folder / "sparkd.yaml"
        self.state_dir = folder / "state"
        self.output = folder / "daemon.log"
        self.environ = dict(environ or {})
        self.process: subprocess.Popen[bytes] | None = None
        self.client = httpx.Client(base_url=self.url, headers={"x-sparkd-client": "test"}, timeout=HUNG_S, trust_env=False)
        self.configure(settings)
        self.runtime_dir = load_config(self.config, environ={}).runtime_path

    def configure(self, settings: dict[str, Any]) -> None:
        fixed = {"listen": f"127.0.0.1:{self.port}", "state_dir": str(self.state_dir)}
        # What other programs take of this machine must not decide a test: the guard's own are in tests/workers/guard.
        settings = {"memory": {"guard": "off"}} | settings
        # Whole or not at all, for a daemon that reads it at this moment: an empty file is a configuration, too.
        part = self.config.with_suffix(".part")
        part.write_text(yaml.safe_dump(settings | fixed))
        part.rename(self.config)

    def start(self, *arguments: str) -> None:
        """Without waiting for anything."""
        self._launch((), arguments)

    def _launch(self, through: Sequence[str], arguments: Sequence[str], pass_fds: Sequence[int] = ()) -> None:
        """through: a command that becomes the one behind it; pass_fds: descriptors that it inherits."""
        serve = [sys.executable, "-m", self.program, "serve", "--config", str(self.config), "--log-level", "info", *arguments]
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*through, *serve],
                cwd=self.root,
                env=os.environ | self.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=pass_fds,
            )

    def settled(self) -> None:
        until(lambda: self._status_of("/readyz") == 200, f"/readyz; {self.tail()}")

    def ray_connected(self) -> None:
        until(lambda: self.status().get("cluster", {}).get("connected"), "Ray connected", 0.2)

    def status(self) -> dict[str, Any]:
        return dict(self.get("/admin/v1/status") or {})

    def model(self, name: str) -> dict[str, Any]:
        return dict(self.get(f"/admin/v1/models/{name}") or {})

    def pids_of(self, name: str) -> list[int]:
        """The shims of the ranks; none while a new attempt places them."""
        return [int(rank["pid"]) for rank in self.model(name)["ranks"]]

    def pid_of(self, name: str) -> int:
        """The shim of the first rank."""
        return self.pids_of(name)[0]

    def wait_for(self, name: str, state: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            seen = self.model(name)
            return seen if seen.get("state") == state else None

        return until(look, f"{name} {state}", 0.1)

    def load(self, name: str) -> str:
        response = self.client.post(f"/admin/v1/models/{name}/load")
        response.raise_for_status()
        return str(response.json()["operation"])

    def unload(self, name: str) -> None:
        self.client.post(f"/admin/v1/models/{name}/unload").raise_for_status()

    def chat(self, model: str, question: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 16} | fields
        return self.client.post("/v1/chat/completions", json=body)

    def get(self, path: str) -> Any:
        try:
            return self.client.get(path).json()
        except (httpx.HTTPError, ValueError):
            return None

    def metric(self, name: str, *labels: str) -> float:
        """The first sample whose line begins with `name` and contains each of `labels`."""
        text = self.client.get("/metrics").text
        found = [line for line in text.splitlines() if line.startswith(name) and all(label in line for label in labels)]
        return float(found[0].split()[-1]) if found else float("nan")

    def sum_of(self, name: str) -> float:
        """The sum of all samples of a metric."""
        return sum(float(line.split()[-1]) for line in self.client.get("/metrics").text.splitlines() if line.startswith(f"{name}{{"))

    def kill(self) -> None:
        """kill -9 of the daemon alone."""
        if self.process:
            self.process.kill()
            self.process.wait(HUNG_S)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process is None:
            return 0
        self.process.send_signal(number)
        return self.process.wait(HUNG_S)

    def gone(self) -> None:
        """Ended by Ctrl-C, and nothing of it is left."""
        self.end(signal.SIGINT)
        self.client.close()
        until(lambda: not self.leftovers(), f"nothing is left: {self.leftovers()}")

    def forget(self) -> None:
        """Remove what a daemon leaves that was killed with all of its processes."""
        shutil.rmtree(self.runtime_dir, ignore_errors=True)

    def ray_pids(self) -> list[int]:
        return [int(process["pid"]) for process in self.status().get("costs", {}).get("ray", [])]

    def leftovers(self) -> list[str]:
        """Command lines of every process that carries this state directory or its runtime directory, the daemon's own included."""
        marks = (str(self.runtime_dir), str(self.state_dir))
        others = [pid for pid in psutil.pids() if pid != os.getpid() and any(mark in text_of(pid) for mark in marks)]
        return [f"{pid} {' '.join(command_of(pid))[:120]}" for pid in others if alive(pid)]

    def tail(self) -> str:
        return self.output.read_text(errors="replace")[-3000:] if self.output.exists() else ""

    def _status_of(self, path: str) -> int:
        try:
            return self.client.get(path).status_code
        except httpx.HTTPError:
            if self.process and self.process.poll() is not None:
                raise AssertionError(f"the daemon ended with {self.process.returncode}: {self.tail()}") from None
            return 0


@contextlib.contextmanager
def daemon(folder: Path, settings: dict[str, Any], *arguments: str, environ: dict[str, str] | None = None) -> Iterator[DaemonProcess]:
    """Started and settled; ended with everything it started, which is checked."""
    made = DaemonProcess(folder, settings, environ)
    made.start(*arguments)
    try:
        made.settled()
        yield made
    finally:
        made.gone()
