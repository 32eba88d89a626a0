"""A second node that joins, takes a model's files, loses its head, comes back and leaves: two network namespaces, real Ray, a hub here."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparkd.joined import RECORD, TOKEN
from tests.daemon_process import ROOT, DaemonProcess, alive, until
from tests.hub_server import COMMIT, Repository, serving
from tests.namespaces import INTERFACE, Namespace, two_nodes
from tests.shards import layered, write_folder
from workers.hub_cache import snapshot_of

RAY_PORT = 6379
HUB_ID = "owner/name"


@dataclass
class Stage:
    here: Namespace
    there: Namespace
    folder: Path
    daemon: DaemonProcess
    repository: Repository
    join: subprocess.Popen[str] | None = None

    @property
    def head(self) -> str:
        return f"{self.here.address}:{RAY_PORT}"

    @property
    def state_dir(self) -> Path:
        return self.folder / "b" / "state"

    def environ(self, node: str) -> dict[str, str]:
        return {"HF_HOME": str(self.folder / node / "hub")}

    def sparkd(
        self, *words: str, node: Namespace | None = None, check: int | None = 0, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        with (node or self.here).entered():
            done = subprocess.run(
                [sys.executable, "-m", "sparkd", *words],
                cwd=ROOT,
                env=os.environ | {"SPARKD_URL": self.daemon.url},
                input=stdin,
                capture_output=True,
                text=True,
                timeout=90,
                check=False,
            )
        assert done.returncode == check, (done.returncode, done.stderr[-2000:])
        return done

    def joins(self, *words: str, stdin: str | None = None) -> None:
        """`sparkd join` on the second node, until it is ended. It runs in a session of its own, as a terminal's would."""
        config = self.folder / "b" / "sparkd.yaml"
        with self.there.entered(), (self.folder / "b" / "join.log").open("a") as output:
            self.join = subprocess.Popen(
                [sys.executable, "-m", "sparkd", "join", self.head, "--config", str(config), *words],
                cwd=ROOT,
                env=os.environ | self.environ("b"),
                stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                text=True,
                start_new_session=True,
            )
        if stdin is not None and self.join.stdin is not None:
            self.join.stdin.write(stdin)
            self.join.stdin.close()

    def nodes(self) -> Mapping[str, Any]:
        return self.daemon.get("/admin/v1/nodes") or {"nodes": [], "offered": []}

    def agents(self) -> dict[str, bool]:
        return {node["node_id"]: node["agent"] for node in self.nodes()["nodes"]}

    def both(self, timeout_s: float = 40.0) -> None:
        both = {self.here.address: True, self.there.address: True}
        until(lambda: self.agents() == both, timeout_s, f"both nodes: {self.told()}", 0.1)

    def told(self) -> str:
        with contextlib.suppress(OSError):
            return (self.folder / "b" / "join.log").read_text()[-2000:]
        return ""

    def raylet(self) -> int:
        return next((pid for pid in self.there.pids() if _name(pid) == "raylet"), 0)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("join")
    for name in ("a", "b", "plain"):
        (folder / name).mkdir()
    (folder / "plain" / "config.json").write_text("{}")
    shards = {f"model-{number}.safetensors": layered(2, {"weight": (512, 512 * number)}, f"part{number}") for number in (1, 2)}
    repository = Repository(write_folder(folder / "repository", shards, {"model_type": "llama"}, index=True))
    with two_nodes() as (here, there), here.entered(), serving(repository):
        settings = {
            "cluster": {"node_ip": here.address, "port": RAY_PORT},
            "engine": {"entrypoint": "workers.stub", "stop_timeout_s": 2, "env": {"HF_ENDPOINT": repository.hub, "NO_PROXY": "127.0.0.1"}},
            "models": {"tiny": {"model": HUB_ID}, "plain": {"model": str(folder / "plain")}},
        }
        made = Stage(here, there, folder, DaemonProcess(folder / "a", settings), repository)
        made.daemon = DaemonProcess(folder / "a", settings, made.environ("a") | {"HF_HUB_OFFLINE": "0"})
        other = {"state_dir": str(made.state_dir), "runtime_dir": str(folder / "b" / "run"), "engine": {"stop_timeout_s": 2}}
        (folder / "b" / "sparkd.yaml").write_text(yaml.safe_dump(other))
        try:
            made.daemon.start()
            made.daemon.settled()
            made.daemon.ray_connected()
            yield made
        finally:
            made.daemon.client.close()
            for process in (made.daemon.process, made.join):
                if process:
                    process.kill()
                    process.wait(10)


def test_who_is_at_the_end_of_the_cable_is_offered_and_not_joined(stage: Stage) -> None:
    (offered,) = until(lambda: stage.nodes()["offered"], 15, "somebody is offered", 0.5)

    assert (offered["cage"], offered["answers"]) == ("cage 0", True)
    assert f"on {INTERFACE} (" in offered["told"] and offered["told"].endswith(", cage 0) answers")
    assert list(stage.agents()) == [stage.here.address]
    assert f"run `sparkd join {stage.head}` there" in stage.sparkd("nodes").stdout


def test_the_head_tells_how_to_join_and_another_token_is_refused(stage: Stage) -> None:
    told = json.loads(stage.sparkd("token", "--config", str(stage.daemon.config), "--json").stdout)
    assert (told["address"], told["command"]) == (stage.head, f"sparkd join {stage.head} --token -")
    config = ("--config", str(stage.folder / "b" / "sparkd.yaml"))
    wrong = stage.sparkd("join", stage.head, "--token", "-", *config, node=stage.there, check=4, stdin=f"{'0' * 64}\n")
    nobody = stage.sparkd("join", f"{stage.here.address}:6380", "--token", "-", *config, node=stage.there, check=4, stdin="0" * 64)
    myself = stage.sparkd("join", stage.there.address, "--token", "-", *config, node=stage.there, check=2, stdin="0" * 64)

    assert "does not take this token: `sparkd token` on the head prints its own" in wrong.stderr
    assert "nothing listens there" in nobody.stderr
    assert "is this node itself" in myself.stderr
    assert not stage.state_dir.exists()


def test_a_node_joins_and_the_head_sees_it(stage: Stage) -> None:
    token = stage.sparkd("token", "--config", str(stage.daemon.config), "-q").stdout
    stage.joins("--token", "-", stdin=token)
    stage.both()

    assert f"{stage.there.address} is {INTERFACE} (QSFP, cage 0" in stage.told()
    assert stage.nodes()["offered"] == [] or len(stage.nodes()["nodes"]) == 2
    assert {path.name: path.stat().st_mode & 0o777 for path in stage.state_dir.glob("join.*")} == {RECORD: 0o600, TOKEN: 0o600}
    secret = token.strip().encode()
    for pid in stage.there.pids():
        assert secret not in _read(f"/proc/{pid}/cmdline") + _read(f"/proc/{pid}/environ")
    assert secret not in (stage.folder / "b" / "join.log").read_bytes() + stage.daemon.output.read_bytes()
    ours = {_name(pid) for pid in stage.there.pids()}
    assert {name for name in ours if not name.startswith("ray") and "python" not in name} == set()


def test_a_model_is_downloaded_once_and_copied_to_the_other_node(stage: Stage) -> None:
    told = stage.sparkd("pull", "tiny").stdout
    here, there = (snapshot_of(HUB_ID, None, stage.environ(node)) for node in ("a", "b"))

    assert here is not None and there is not None
    assert told.startswith(f"{HUB_ID} (0.00 GB) is on {stage.here.address}, {stage.there.address}: ")
    names = sorted(path.name for path in stage.repository.folder.iterdir())
    assert sorted(path.name for path in there.iterdir()) == names
    assert all((there / name).read_bytes() == (stage.repository.folder / name).read_bytes() for name in names)
    assert (there.name, (there.parent.parent / "refs" / "main").read_text()) == (COMMIT, COMMIT)
    weights = [asked for asked in stage.repository.asked if asked.server == "store" and asked.sent]
    assert len(weights) == len([name for name in names if name.endswith(".safetensors")])
    assert "nothing was lacking" in stage.sparkd("pull", HUB_ID, "--nodes", stage.there.address).stdout


def test_what_cannot_be_pulled_says_why(stage: Stage) -> None:
    for words, code, told in (
        (("no-such-model",), 5, "is not known here"),
        (("tiny", "--nodes", "192.0.2.9"), 5, "192.0.2.9 is no node in sight; there is 192.168.100.10, 192.168.100.11"),
        (("owner/missing",), 4, "owner/missing"),
    ):
        assert told in stage.sparkd("pull", *words, check=code).stderr, words
    assert "is on" in stage.sparkd("pull", "plain").stdout


def test_a_raylet_of_an_earlier_head_is_ended_and_not_taken_over(stage: Stage) -> None:
    before = stage.raylet()
    assert stage.join is not None and before
    for process in (stage.join, stage.daemon.process):
        assert process is not None
        process.kill()
        process.wait(10)
    for pid in stage.here.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    stage.daemon.start()
    stage.daemon.settled()
    stage.daemon.ray_connected()
    assert alive(before), "Ray itself has not noticed yet"
    stage.joins()
    stage.both()

    assert not alive(before) and stage.raylet() not in (0, before)


def test_a_raylet_that_dies_is_started_again(stage: Stage) -> None:
    before = stage.raylet()
    os.kill(before, signal.SIGKILL)
    until(lambda: stage.raylet() not in (0, before), 30, "another raylet", 0.1)
    stage.both()


def test_leaving_undoes_it(stage: Stage) -> None:
    left = stage.sparkd("leave", "--config", str(stage.folder / "b" / "sparkd.yaml"), node=stage.there)

    assert left.stdout == f"This node has left {stage.head}.\n"
    assert stage.join is not None and stage.join.wait(20) == 0
    assert stage.there.pids() == []
    assert sorted(path.name for path in stage.state_dir.glob("join.*")) == []
    until(lambda: not stage.agents().get(stage.there.address, False), 20, "the head has noticed", 0.2)
    assert stage.daemon.end(signal.SIGINT) == 0


def _name(pid: int) -> str:
    words = _read(f"/proc/{pid}/cmdline").split(bytes(1))
    return os.path.basename(words[0].decode("utf-8", "replace")).strip()


def _read(path: str) -> bytes:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read()
    return b""
