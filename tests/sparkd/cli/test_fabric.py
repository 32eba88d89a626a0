"""`sparkd fabric` as it is typed: folders that stand for nodes, this machine, a daemon; what it draws, answers as JSON, and refuses."""

from __future__ import annotations

import json
import os
import subprocess
from functools import partial
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sparkd.__main__ import exit_code
from sparkd.admin.client import Client
from sparkd.cluster import membership
from sparkd.config.config import load_config
from sparkd.errors import EngineError, SparkdError, Unauthorized, Unavailable
from sparkd.fabric.report import report
from sparkd.render import fabric
from tests.support.fabric_tree import readings, scenarios, write_nodes

SCENARIOS = scenarios()
DOCUMENT = (Path(__file__).resolve().parents[3] / "docs/cluster.md").read_text()


def roots(folder: Path, name: str) -> list[str]:
    return [word for root in write_nodes(folder, SCENARIOS[name]["nodes"]) for word in ("--root", str(root))]


def drawn(found: dict[str, Any], columns: int, *, env: bool = False, encoding: str = "utf-8") -> str:
    """On a terminal without colours, so that what is tested is the text."""
    written = BytesIO()
    file = TextIOWrapper(written, encoding=encoding)
    console = Console(file=file, width=columns, force_terminal=True, color_system=None, highlight=False)
    (fabric.environment if env else fabric.fabric)(found, console)
    file.flush()
    return "\n".join(line.rstrip() for line in written.getvalue().decode().splitlines()) + "\n"


def report_of(name: str) -> dict[str, Any]:
    return report(readings(name))


@pytest.mark.parametrize(
    ("name", "code"),
    [("pair-different-ports", 0), ("half-trained", 1)],
)
def test_the_exit_code_tells_whether_something_fails(name: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["--json", "fabric", *roots(tmp_path, name)]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"] == "fail") is bool(code)
    assert found.keys() == {"nodes", "cables", "topology", "tensor_parallel", "findings", "verdict", "environment", "offered", "rates"}


def test_the_picture_of_a_pair_is_the_readme_s() -> None:
    assert f"```\n{drawn(report_of('twin-without-address'), 110)}```" in DOCUMENT


def test_the_environment_is_what_a_shell_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["fabric", "--env", *roots(tmp_path, "pair-different-ports")]) == 0
    text = capsys.readouterr().out
    (first, second) = text.split("# spark-2")
    done = subprocess.run(["sh", "-ec", f"{first}\necho $NCCL_IB_HCA $VLLM_HOST_IP"], capture_output=True, text=True, check=True)

    assert done.stdout == "=rocep1s0f1,roceP2p1s0f1 192.168.100.11\n"
    assert "GLOO_SOCKET_IFNAME=enp1s0f0np0\n#   Gloo, " in second
    assert "# NCCL_IB_GID_INDEX stays unset\n#   NCCL 2.21 " in second


def test_without_a_daemon_this_node_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code = exit_code(["fabric"])
    shown = capsys.readouterr()

    assert code in (0, 1)
    assert "node only" in shown.err and shown.err.count("\n") == 1
    assert shown.out.splitlines()[0] == os.uname().nodename


@pytest.mark.parametrize("has_joined", [False, True])
def test_a_node_that_has_joined_offers_nobody(
    has_joined: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Least of all its own head: whom it meets is of that cluster, or is to join that head."""
    raw = readings("cable-to-a-stranger")["spark-1"]
    monkeypatch.setattr("workers.host.network.sample", lambda: raw)
    monkeypatch.setattr("workers.host.link_peers.knock", list)
    monkeypatch.setenv("SPARKD_STATE_DIR", str(tmp_path))
    if has_joined:
        membership.keep(load_config(None, environ=os.environ), membership.Membership("10.0.8.9:6379", "10.0.8.1"), "t" * 64)
    exit_code(["fabric", "--json"])
    assert bool(json.loads(capsys.readouterr().out)["offered"]) is not has_joined


class Daemon:
    """A client whose operation ends in `end` once its progress was asked for."""

    def __init__(self, end: str, message: str) -> None:
        self.operation = {"id": "op", "state": "RUNNING", "message": "measuring", "progress": None}
        self.end = {"state": end, "message": message}
        self.asked: list[tuple[str, object]] = []
        self.found = report_of("pair-different-ports")
        names = {"a": "spark-1", "b": "spark-2", "network": "IB", "at_s": 5.0}
        self.found["rates"] = [names | {"gb_s": 21.5, "normal_gb_s": "20 to 24", "verdict": "ok"}]

    def get(self, path: str, **_: object) -> dict[str, Any]:
        return self.found if path == "/fabric" else self.operation | self.end

    def post(self, path: str, body: object = None) -> dict[str, Any]:
        self.asked.append((path, body))
        return self.operation

    def delete(self, path: str) -> dict[str, Any]:
        self.asked.append((path, None))
        return {}


def _without_client(method: Any, *words: Any, **more: Any) -> Any:
    return method(*(word for word in words if not isinstance(word, Client)), **more)


def measured(monkeypatch: pytest.MonkeyPatch, *words: str, end: str = "SUCCEEDED", message: str = "done") -> tuple[int, Daemon]:
    daemon = Daemon(end, message)
    for method in ("get", "post", "delete"):
        monkeypatch.setattr(f"sparkd.admin.client.Client.{method}", staticmethod(partial(_without_client, getattr(daemon, method))))
    return exit_code(["fabric", "--measure", *words]), daemon


def test_a_measurement_is_asked_for_by_name_and_shown_beside_what_is_normal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, daemon = measured(monkeypatch, "spark-1,10.0.0.9", "--force")
    addresses = {node["node"]: node["address"] or node["node"] for node in daemon.found["nodes"]}
    assert (code, daemon.asked) == (0, [("/fabric/measure", {"nodes": [addresses["spark-1"], "10.0.0.9"], "force": True})])
    assert "Measured  spark-1 - spark-2  21.50 GB/s (20 to 24 is normal)  IB, 19" in capsys.readouterr().out

    code, daemon = measured(monkeypatch, "all", "--timeout", "0")
    assert (code, [path for path, _ in daemon.asked]) == (7, ["/fabric/measure", "/operations/op"])
    assert (measured(monkeypatch, "spark-1")[0], measured(monkeypatch, "all", end="CANCELLED")[0]) == (2, 5)
    assert measured(monkeypatch, "all", end="FAILED", message="They do not meet.")[0] == 4
    assert "error: They do not meet." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (None, 1, ""),
        (Unavailable("No sparkd answers."), 0, ""),
        (Unauthorized(), 0, ""),
        (EngineError("Something else."), 1, "Something else"),
    ],
)
def test_the_daemon_is_asked_first(
    error: SparkdError | None, code: int, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = report_of("half-trained")
    (here,) = readings("no-cable-card-absent").values()

    def get(client: object, path: str) -> dict[str, Any]:
        assert path == "/fabric"
        if error:
            raise error
        return found

    monkeypatch.setattr("sparkd.admin.client.Client.get", get)
    monkeypatch.setattr("workers.host.network.sample", lambda: here)
    assert exit_code(["fabric"]) == code
    shown = capsys.readouterr()
    assert told in shown.err
    assert ("Cables" in shown.out, "no ConnectX-7" in shown.out) == (error is None, error is not None and code == 0)
