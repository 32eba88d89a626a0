"""Folders for a node's /, as no kernel would fill them: whatever stands in them, doctor and fabric answer, and steer no terminal."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from sparkd.__main__ import exit_code
from sparkd.doctor.report import report as examined
from sparkd.render import fabric
from tests.support.doctor_tree import GOOD, write
from tests.support.fabric_tree import scenarios, write_nodes
from workers.host import inspection
from workers.host.network import QUESTIONS

STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\x00 [/] [bold]x"
SMI = "captured/nvidia-smi.txt"
# A file is expected, and one of these stands there instead.
KINDS = st.sampled_from(["pipe", "folder", "loop", "missing"])
TEXTS = st.text(max_size=24) | st.sampled_from([
    "", "0", "-1", "²", "9" * 30, "9" * 5000, "1e400", "nan", "1.2.3 Gb/sec", "x y z", "a: b\n", ESCAPES, "\n\n", "4: ACTIVE", "unlimited",
    "No devices were found\n", ",,,,,\n", "a,b,nan,inf,-1,1e9\n", "0x1003", "p0", "p99999999999", "Max locked memory  ² ²  bytes\n",
])  # fmt: skip
WORDS = [
    "ifname", "address", "mtu", "flags", "addr_info", "family", "local", "prefixlen", "parentdev", "ifindex", "dst", "dev", "lladdr",
    "state", "gateway", "metric", "phys_port_name", "phys_switch_id",
]  # fmt: skip
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.sampled_from([
    "inet", "UP", "LOWER_UP", "enp1s0f0np0", "enP2p1s0f1np1", "lo", "..", "a/b", "wlan0", "10.0.0.1", "255.255.255.255", "FAILED", ESCAPES,
    32, 99, "0000:01:00.0", ["UP", "LOWER_UP"],
])  # fmt: skip
ADDRESSES = st.fixed_dictionaries(
    {}, optional={"family": st.just("inet") | PLAIN, "local": st.sampled_from(["10.0.0.1", "0.0.0.0", "999.1.1.1", None]) | PLAIN,
                  "prefixlen": st.sampled_from([0, 24, 31, 32, 33, None]) | PLAIN}
)  # fmt: skip
LINKS = st.fixed_dictionaries(
    {"ifname": st.sampled_from(["enp1s0f0np0", "enp1s0f1np1", "enP2p1s0f0np0", "wlan0", "eth0"]) | PLAIN},
    optional={"flags": PLAIN, "mtu": PLAIN, "address": PLAIN, "addr_info": st.lists(ADDRESSES | PLAIN, max_size=3) | PLAIN},
)
ANYTHING = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4))
ANSWERS = st.lists(LINKS | st.dictionaries(st.sampled_from(WORDS), ANYTHING, max_size=5), max_size=4) | ANYTHING


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKD_URL", "http://127.0.0.1:9")


def put(path: Path, content: str) -> None:
    """content: a text, or one of KINDS."""
    if path.is_dir() and not path.is_symlink():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if content == "pipe":
        os.mkfifo(path)
    elif content == "folder":
        path.mkdir()
    elif content == "loop":
        path.symlink_to(path.name)
    elif content != "missing":
        path.write_text(content, errors="replace")


def output_of(capsys: pytest.CaptureFixture[str], *argv: object, codes: tuple[int, ...] = (0, 1)) -> str:
    assert exit_code([*map(str, argv)]) in codes
    captured = capsys.readouterr()
    assert not STEERS.search(captured.out) and not STEERS.search(captured.err)
    return captured.out


def drawn(draw: Callable[[Any, Console], None], found: Any) -> str:
    """On a pipe of 80 columns, which no colour steers."""
    file = io.StringIO()
    draw(found, Console(file=file, width=80, color_system=None))
    return file.getvalue()


def fresh(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """An empty folder: one for all examples of a test, which are many."""
    folder = tmp_path_factory.getbasetemp() / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


@settings(max_examples=40, deadline=None, database=None)
@given(st.dictionaries(st.sampled_from([*GOOD, "proc/4711/comm", "proc/4711/statm", "proc/²/comm", "etc/default/earlyoom"]), TEXTS | KINDS))
def test_doctor_answers_whatever_a_tree_holds(tmp_path_factory: pytest.TempPathFactory, changes: Mapping[str, str]) -> None:
    root = write(fresh(tmp_path_factory, "doctor"))
    for name, content in changes.items():
        put(root / name, content)

    raw = inspection.sample(root)

    found = examined({raw["host"]: raw})
    json.dumps(found)
    assert not STEERS.search(drawn(fabric.findings, found["findings"]))


@settings(max_examples=12, deadline=None, database=None)
@given(st.data())
def test_fabric_answers_whatever_a_tree_holds(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    from sparkd.fabric.report import report
    from workers.host.network import sample

    roots = write_nodes(fresh(tmp_path_factory, "fabric"), {"a": {}, "b": {}})
    files = sorted(path for root in roots for path in root.rglob("*") if path.is_file())
    for path in data.draw(st.lists(st.sampled_from(files), max_size=6)):
        put(path, data.draw(TEXTS | KINDS))
    for root in roots:
        if name := data.draw(st.none() | st.sampled_from([*QUESTIONS])):
            put(root / name, json.dumps(data.draw(ANSWERS)))

    readings = {str(root): sample(root) for root in roots}

    found = report(readings)
    json.dumps([found, readings])
    assert not STEERS.search(drawn(fabric.fabric, found) + drawn(fabric.environment, found))


@pytest.mark.parametrize(("verb", "as_json"), [("doctor", False), ("doctor", True), ("fabric", True), ("fabric --env", False)])
def test_a_hosts_name_does_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, as_json: bool) -> None:
    roots = write_nodes(tmp_path, scenarios()["pair-two-cables"]["nodes"]) if verb != "doctor" else [write(tmp_path / "a")]
    for number, root in enumerate(roots):
        put(root / "etc/hostname", f"{number}{ESCAPES}\nsecond line\n")

    out = output_of(capsys, *(["--json"] if as_json else []), *verb.split(), *(word for root in roots for word in ("--root", root)))

    assert "owned" in out and "second line" not in out


def test_nulls_in_what_ip_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_nodes(tmp_path, {"a": {}})[0]
    answer = json.loads((root / "ip-address.json").read_text())
    for key in ("flags", "addr_info", "address", "mtu", "ifname"):
        (root / "ip-address.json").write_text(json.dumps([{**link, key: None} for link in answer] + [None]))

        found: dict[str, Any] = json.loads(output_of(capsys, "--json", "fabric", "--root", root))

        assert len(found["nodes"]) == 1, key


@pytest.mark.parametrize("answer", ["No devices were found\n", "\n"])
def test_no_gpu_is_not_well(tmp_path: Path, answer: str) -> None:
    raw = inspection.sample(write(tmp_path, {SMI: answer}))

    found = [one for one in examined({"a": raw})["findings"] if one["about"] == "GPU"]

    assert [(one["check"], one["verdict"]) for one in found] == [("nvidia-smi", "fail")]
