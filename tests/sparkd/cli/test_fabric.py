"""`sparkd fabric` as it is typed: what it draws, answers as JSON, and refuses."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sparkd.__main__ import exit_code
from sparkd.admin.client import Client
from sparkd.errors import Unavailable
from sparkd.fabric.report import report
from sparkd.render import fabric
from tests.support.fabric_tree import readings

DOCUMENT = (Path(__file__).resolve().parents[3] / "docs/cluster.md").read_text()


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
def test_the_exit_code_tells_whether_something_fails(
    name: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sparkd.admin.client.Client.get", lambda client, path: report_of(name))
    assert exit_code(["--json", "fabric"]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"] == "fail") is bool(code)
    assert found.keys() == {"nodes", "cables", "topology", "tensor_parallel", "findings", "verdict", "environment", "offered", "rates"}


def test_the_picture_of_a_pair_is_the_readme_s() -> None:
    assert f"```\n{drawn(report_of('twin-without-address'), 110)}```" in DOCUMENT


def test_the_environment_is_what_a_shell_takes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sparkd.admin.client.Client.get", lambda client, path: report_of("pair-different-ports"))
    assert exit_code(["fabric", "--env"]) == 0
    text = capsys.readouterr().out
    (first, second) = text.split("# spark-2")
    done = subprocess.run(["sh", "-ec", f"{first}\necho $NCCL_IB_HCA $VLLM_HOST_IP"], capture_output=True, text=True, check=True)

    assert done.stdout == "=rocep1s0f1,roceP2p1s0f1 192.168.100.11\n"
    assert "GLOO_SOCKET_IFNAME=enp1s0f0np0\n#   Gloo, " in second
    assert "# NCCL_IB_GID_INDEX stays unset\n#   NCCL 2.21 " in second


class Daemon:
    """A client whose operation ends in `end` once its progress was asked for."""

    def __init__(self, end: str, message: str) -> None:
        self.operation = {"id": "op", "kind": "measure", "state": "RUNNING", "message": "measuring", "progress": None}
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
    assert (code, [path for path, _ in daemon.asked]) == (7, ["/fabric/measure"])
    assert (measured(monkeypatch, "spark-1")[0], measured(monkeypatch, "all", end="CANCELLED")[0]) == (2, 5)
    assert measured(monkeypatch, "all", end="FAILED", message="They do not meet.")[0] == 4
    assert "error: They do not meet." in capsys.readouterr().err


def test_all_nodes_are_the_daemons_to_tell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkd.admin.client.Client.get", lambda client, path: report_of("half-trained"))
    assert exit_code(["fabric"]) == 1
    assert "Cables" in capsys.readouterr().out

    def nobody(client: object, path: str) -> None:
        raise Unavailable("No sparkd answers.")

    monkeypatch.setattr("sparkd.admin.client.Client.get", nobody)
    assert exit_code(["fabric"]) == 7
