"""Joining, as far as it needs no Ray: by which address, what is kept of it, what is refused and in which words; who is offered."""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import socket
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sparkd import __version__
from sparkd.__main__ import exit_code
from sparkd.cli import join
from sparkd.cluster import head_probe, machine_lock, membership
from sparkd.cluster.head_probe import Head, ask_head, find_head
from sparkd.cluster.join_route import route_to
from sparkd.cluster.node_paths import rank_folders
from sparkd.cluster.ray_head import RayHead, RayOptions
from sparkd.cluster.ray_node import node_of
from sparkd.config.config import Config, load_config
from sparkd.daemon import logs
from sparkd.errors import ConfigError, Conflict, RayUnavailable, StateError
from sparkd.fabric.interfaces import Fabric, fabric_of
from sparkd.fabric.peers import peers
from sparkd.fabric.report import report
from sparkd.render import fabric
from tests.support.fabric_tree import readings
from tests.support.facts import lacking
from tests.support.stuck_driver import a_stuck_driver
from tests.support.waiting import HUNG_S
from workers.agent.actor import Agent
from workers.host import processes
from workers.host.link_peers import knock

TOKEN = "0123456789abcdef" * 4
HEAD = "192.168.100.10:6379"
stuck_driver = pytest.fixture(name="stuck_driver")(a_stuck_driver)


def config_of(folder: Path, **flags: Any) -> Config:
    settings = {name.replace("__", "."): value for name, value in flags.items()} | {"state_dir": str(folder / "state")}
    return load_config(None, flags=settings, environ={})


def nodes_of(name: str, **changes: Mapping[str, Any]) -> list[Fabric]:
    return [fabric_of(node, raw | changes.get(node.replace("-", "_"), {})) for node, raw in readings(name).items()]


# By which address


def test_the_address_on_the_cable_is_explained() -> None:
    route = route_to("192.168.100.12", "192.168.100.11", nodes_of("pair-different-ports")[0])

    assert route.node_ip == "192.168.100.11"
    assert lacking(route.why, "192.168.100.11", "enp1s0f1np1", "QSFP", "cage 1", "200G", "MTU 9000", "192.168.100.0/24") == []
    assert route.warning is None


def test_a_head_that_is_reached_over_the_lan_although_a_cable_is_there_is_doubted() -> None:
    (node, *_) = nodes_of("pair-different-ports")
    lan = next(one for one in node.lans if one.addresses)
    route = route_to(str(lan.addresses[0].ip + 1), str(lan.addresses[0].ip), node)

    assert "(LAN)" in route.why
    assert lacking(route.warning, "192.168.100.11/24", "join") == []


def test_the_operators_choice_counts_where_this_node_has_it() -> None:
    (node, *_) = nodes_of("pair-different-ports")
    other = next(str(one.addresses[0].ip) for one in node.lans if one.addresses)

    assert route_to("192.168.100.12", "192.168.100.11", node, other).node_ip == other
    with pytest.raises(ConfigError, match=r"--node-ip 10\.9\.9\.9: .*192\.168\.100\.11 \(enp1s0f1np1\)"):
        route_to("192.168.100.12", "192.168.100.11", node, "10.9.9.9")
    for wrong in ("fe80::1", "spark-b"):
        with pytest.raises(ConfigError, match=f"--node-ip {wrong} .*IPv4"):
            route_to("192.168.100.12", "192.168.100.11", node, wrong)
    assert route_to("10.0.0.1", "10.0.0.2", None).node_ip == "10.0.0.2"
    assert route_to("10.0.0.1", "10.0.0.2", None, "10.0.0.3").node_ip == "10.0.0.3"


# The head


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a b", ["'a b'", "address"]),
        ("no-such-host.invalid", ["no-such-host.invalid", "IPv4"]),
        ("localhost:6379", ["localhost", "itself"]),
    ],
)
def test_what_is_no_head_of_another_node(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        find_head(text)
    assert lacking(caught.value.message, *words) == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError(), ["5 s", "firewall"]),
        (ConnectionRefusedError(111, "Connection refused"), ["listens", "cluster.port", "6379"]),
        (OSError(113, "No route to host"), ["no route", "No route to host"]),
    ],
)
def test_a_head_that_cannot_be_reached_says_what_helps(error: OSError, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        assert (address, timeout) == (("192.0.2.1", 6379), head_probe.REACH_TIMEOUT_S)
        raise error

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(RayUnavailable) as caught:
        find_head("192.0.2.1")
    assert lacking(caught.value.message, "192.0.2.1:6379", *words) == []


def answer(**changes: Any) -> dict[str, Any]:
    ours = {"ray": head_probe.importlib.metadata.version("ray"), "python": head_probe.platform.python_version()}
    return ours | {"nodes": {"192.168.100.10": {"sparkd-version": __version__}}} | changes


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"refused": "token"}, ["`sparkd token`"]),
        ({"refused": "silent", "why": "RpcError"}, ["No Ray", "RpcError"]),
        (answer(ray="2.59.0"), ["Ray 2.59.0", "2.60.0", "same release"]),
    ],
)
def test_a_head_that_does_not_fit_names_both_values(
    told: dict[str, Any], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_probe, "probe_head", lambda *_: told)
    with pytest.raises(RayUnavailable) as caught:
        ask_head(Head(HEAD, "192.168.100.10", "192.168.100.11"), tmp_path, "192.168.100.11")
    assert lacking(caught.value.message, *words) == []


# What is kept


def test_what_joining_wrote_is_what_ray_node_joins_with(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert (membership.read(config), membership.applied(config)) == (None, config)
    membership.keep(config, membership.Membership(HEAD, "192.168.100.11"), TOKEN)
    ray = node_of(membership.applied(config), {})

    assert {f"--address={HEAD}", "--node-ip-address=192.168.100.11"} <= set(ray.command())
    assert ray.options.token_path.read_text() == TOKEN
    assert {stat.S_IMODE(path.stat().st_mode) for path in config.state_dir.iterdir()} == {0o600}
    membership.forget(config)
    membership.forget(config)
    assert os.listdir(config.state_dir) == []


def test_a_configuration_that_names_another_head_contradicts(tmp_path: Path) -> None:
    config = config_of(tmp_path, cluster__address="192.0.2.9:6379")
    membership.keep(config, membership.Membership(HEAD, "192.168.100.11"), TOKEN)
    with pytest.raises(ConfigError, match="sparkd leave"):
        membership.applied(config)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(StateError, match=f"{tmp_path}/state"):
        membership.keep(config_of(tmp_path), membership.Membership(HEAD, "192.168.100.11"), TOKEN)


def test_the_record_of_an_earlier_release_is_read_and_one_that_leads_elsewhere_is_not(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    membership.keep(config, membership.Membership(HEAD, "192.168.100.11"), TOKEN)
    record = config.state_dir / membership.RECORD
    written = json.loads(record.read_text())
    record.write_text(json.dumps(written | {"unit": True, "enabled": False, "active": True}))
    assert membership.read(config) == membership.Membership(HEAD, "192.168.100.11")

    for raw in ([], written | {"node_ip": "../../keep"}, {"node_ip": "192.168.100.11"}):
        record.write_text(json.dumps(raw))
        with pytest.raises(StateError, match="damaged"):
            membership.read(config)


def test_a_node_that_has_joined_serves_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # What it does to this process's log would outlive the test.
    monkeypatch.setattr(logs, "set_up", lambda level, state_dir: None)
    config = config_of(tmp_path)
    membership.keep(config, membership.Membership(HEAD, "192.168.100.11"), TOKEN)

    assert exit_code(["serve", "--state-dir", str(config.state_dir), "--port", "0", "--log-level", "error"]) == 2
    assert f"has joined {HEAD}" in capsys.readouterr().err


# A raylet of another head, or of an earlier one at the same address, is not taken over.


@pytest.mark.parametrize("keeper", [True, False])
def test_a_keeper_ends_what_an_earlier_one_left_and_a_daemon_uses_it(keeper: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray.json").write_text(json.dumps({"address": HEAD, "keeper": True}))
    ray = RayHead(RayOptions(tmp_path, tmp_path / "t", node_ip="192.168.100.11", join=HEAD, keeper=keeper))
    done: list[str] = []
    monkeypatch.setattr(RayHead, "essential", lambda self: {"raylet": 1})
    monkeypatch.setattr(RayHead, "_end", lambda self: done.append("stop"))
    monkeypatch.setattr(RayHead, "_start", lambda self: done.append("start") or "new")

    assert ray.ensure() == ("new" if keeper else HEAD)
    assert done == (["stop", "start"] if keeper else [])


# The verbs


def test_token_prints_what_the_other_node_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sparkd.yaml"
    file.write_text(f"state_dir: {tmp_path}\ncluster: {{node_ip: 192.168.100.10, port: 6379}}\n")
    (tmp_path / "ray.token").write_text(TOKEN)

    assert exit_code(["token", "--config", str(file), "-q"]) == 0
    assert capsys.readouterr().out == f"{TOKEN}\n"
    assert exit_code(["token", "--config", str(file)]) == 0
    out = capsys.readouterr().out
    assert f"sparkd join {HEAD} --token -" in out and f"\n{TOKEN}\n" in out
    assert exit_code(["token", "--config", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"address": HEAD, "command": f"sparkd join {HEAD} --token -", "token": TOKEN}


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ("{node_ip: 192.168.100.10}", "cluster: {node_ip: 192.168.100.10, port: 6379}"),
        ("{address: '192.0.2.1:6379', node_ip: 192.0.2.2}", "192.0.2.1:6379"),
    ],
)
def test_token_says_what_a_head_still_needs(cluster: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sparkd.yaml"
    file.write_text(f"state_dir: {tmp_path}\ncluster: {cluster}\n")

    assert exit_code(["token", "--config", str(file)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("living", "code"), [(HEAD, 0), (None, 2)])
def test_token_says_where_the_ray_that_runs_here_listens(
    living: str | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its daemon has a configuration file that was not named here."""
    (tmp_path / "ray.token").write_text(TOKEN)
    monkeypatch.setattr(RayHead, "living_address", lambda _: living)
    assert exit_code(["token", "--state-dir", str(tmp_path)]) == code
    shown = capsys.readouterr()
    assert f"sparkd join {HEAD} --token -" in shown.out if living == HEAD else "cluster: {node_ip: " in shown.err


def test_the_token_comes_from_stdin_a_file_or_an_earlier_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    kept.write_text(f"{TOKEN}\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"  {TOKEN}\nmore\n"))

    assert [join._token(*one) for one in (("-", None), (str(kept), None), (None, kept))] == [TOKEN] * 3
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigError) as typed:
        join._token(TOKEN, None)
    assert TOKEN not in typed.value.message


@pytest.mark.parametrize("given", ["-", "with a blank in the middle of it"])
def test_what_is_no_token_is_refused_without_it(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    with pytest.raises(ConfigError) as caught:
        join._token(given, None)

    assert given == "-" or given not in caught.value.message


def test_who_has_joined_nobody_cannot_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["leave", "--state-dir", str(tmp_path)]) == 2
    assert "no cluster" in capsys.readouterr().err


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is reached, takes the token and fits; this node's network is that of a fixture."""
    monkeypatch.setattr(head_probe, "find_head", lambda text: Head(HEAD, "192.168.100.12", "192.168.100.11"))
    monkeypatch.setattr(head_probe, "ask_head", lambda head, path, node_ip: None)
    monkeypatch.setattr(join, "_fabric", lambda: nodes_of("pair-different-ports")[0])
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{TOKEN}\n"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that no other sparkd of this machine lends."""
    monkeypatch.setattr(machine_lock, "NAME", f"\0sparkd.test.{os.getpid()}")


@pytest.mark.usefixtures("head", "machine")
def test_the_system_is_told_what_keeps_a_node_and_what_lets_it_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, runtime_dir=str(tmp_path / "run"))
    words = ["--state-dir", str(config.state_dir)]
    monkeypatch.setenv("SPARKD_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr("sparkd.config.config.STATE_DIR", config.state_dir)
    monkeypatch.setattr(join, "SYSTEMD", tmp_path)

    assert exit_code(["join", "spark-1", "--token", "-", *words]) == 0
    told = capsys.readouterr()
    assert lacking(told.err, HEAD, "192.168.100.11", join.STAY) == []
    assert TOKEN not in told.err + told.out
    assert membership.read(config) == membership.Membership(HEAD, "192.168.100.11")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert exit_code(["join", "spark-1", *words]) == 0, "again, with the token that is kept"
    with machine_lock.machine_lock():
        assert exit_code(["leave", *words]) == Conflict.exit_code
    assert join.GO in capsys.readouterr().err and membership.read(config) is not None
    assert exit_code(["leave", *words]) == 0
    assert lacking(capsys.readouterr().out, "left", HEAD) == []
    assert os.listdir(config.state_dir) == []


@pytest.mark.usefixtures("head")
def test_a_node_with_a_daemon_of_its_own_does_not_join(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711")
        lock.flush()
        assert exit_code(["join", "spark-1", "--token", "-", "--state-dir", str(tmp_path)]) == 5
    assert lacking(capsys.readouterr().err, "daemon", "process 4711") == []


@pytest.mark.parametrize("more", [False, True])
def test_a_node_that_leaves_leaves_nothing_of_its_agent_behind(more: bool, tmp_path: Path) -> None:
    """Whatever else somebody has put there stays, and so do the files that the plugin's folder points to."""
    config = load_config(None, flags={"state_dir": tmp_path / "state", "runtime_dir": tmp_path / "run"}, environ={})
    run_dir, *_ = rank_folders(config, "192.0.2.7")
    agent = Agent("192.0.2.7", str(run_dir), str(tmp_path / "logs"))
    agent._expose_plugin()
    agent.guard.stop()
    (run_dir / "guard.lock").touch()
    targets = [one.resolve() for one in (run_dir / "plugin").iterdir() if one.is_symlink()]
    if more:
        (run_dir / "notes").touch()
    membership.keep(config, membership.Membership(HEAD, "192.0.2.7"), TOKEN)
    assert (run_dir / "plugin").is_dir() and targets
    join._end(config, "192.0.2.7")

    assert run_dir.exists() is more
    assert [one.name for one in run_dir.parent.rglob("*")] == ([run_dir.name, "notes"] if more else [])
    assert all(one.exists() for one in targets)


@pytest.mark.usefixtures("machine")
def test_the_join_that_keeps_a_node_is_known_by_its_record_and_ended_by_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stuck_driver: list[str]
) -> None:
    """Also while a driver holds processes of this machine."""
    monkeypatch.setenv("SPARKD_RUNTIME_DIR", str(tmp_path / "run"))
    words = ["--state-dir", str(tmp_path / "state")]
    with subprocess.Popen(["sleep", "600"]) as keeper:
        me = processes.identity(keeper.pid)
        assert me is not None
        membership.keep(config_of(tmp_path), membership.Membership(HEAD, "192.0.2.7", **asdict(me)), TOKEN)
        assert exit_code(["join", HEAD, "--token", "-", *words]) == Conflict.exit_code
        assert str(keeper.pid) in capsys.readouterr().err
        # `leave` waits until it is gone; here its parent, which has to reap it, is this test.
        monkeypatch.setattr(processes, "wait_gone", lambda who, *, timeout_s: keeper.wait(HUNG_S) == -signal.SIGINT)
        assert exit_code(["leave", *words]) == 0
    assert stuck_driver == []


# Who is offered


def test_a_stranger_at_the_end_of_a_cable_is_offered_and_a_node_is_not() -> None:
    assert peers(nodes_of("pair-different-ports")) == ()
    (peer,) = peers(nodes_of("cable-to-a-stranger"))
    assert (peer.node, peer.cage, peer.answers) == ("spark-1", "cage 1", False)
    assert peer.told == "10.0.8.9 on enp1s0f1np1 (spark-1, cage 1) was met"


def test_who_is_of_the_cluster_is_not_offered_though_nobody_could_read_it() -> None:
    """As a node that has just left, which Ray still lists: by any of its addresses, and by its MAC at the other twin."""
    nodes = nodes_of("cable-to-a-stranger")
    assert len(peers(nodes, ["10.0.8.8"])) == 1
    assert peers(nodes, ["10.0.8.9"]) == ()
    raw = readings("cable-to-a-stranger")
    assert len(report(raw)["offered"]) == 1
    assert report({**raw, "10.0.8.9": None})["offered"] == []


def test_twins_are_one_peer_and_a_switch_shows_many() -> None:
    def met(*entries: tuple[str, str, str]) -> Mapping[str, Any]:
        return {"neighbours": [{"dev": dev, "dst": dst, "lladdr": mac, "state": ["REACHABLE"]} for dev, dst, mac in entries]}

    a, b = "enp1s0f1np1", "enP2p1s0f1np1"
    both = met((a, "fe80::1", "aa"), (a, "10.0.0.2", "aa"), (b, "fe80::2", "bb"))
    (one,) = peers(nodes_of("one-cable-port-1", spark_1={**both, "answers": [{"dev": b, "dst": "fe80::2"}]}))
    assert one.seen == ((a, "10.0.0.2", "aa"), (b, "fe80::2", "bb"), (a, "fe80::1", "aa"))
    assert one.told == f"10.0.0.2 on {a} (spark-1, cage 1) answers"

    many = peers(nodes_of("one-cable-port-1", spark_1=met((a, "10.0.0.2", "aa"), (a, "10.0.0.3", "cc"))))
    assert [[mac for *_, mac in peer.seen] for peer in many] == [["aa"], ["cc"]]


def test_nodes_as_they_are_shown() -> None:
    console = Console(file=io.StringIO(), width=200)
    node = {"address": "192.168.100.10", "local": True, "agent": True, "reading": None, "unified_memory_gib": 110.0, "reserved_gib": 70.0}
    offered = [{"told": "10.0.0.2 on enp1s0f0np0 (spark-1, cage 0) answers"}]
    for head in (HEAD, "127.0.0.1:4711"):
        fabric.nodes({"nodes": [node], "offered": offered, "head": head}, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]

    assert "192.168.100.10 (daemon)" in text and "110 GiB" in text
    assert lacking(text, "not joined", f"`sparkd join {HEAD}`", "`sparkd token`") == []


def test_who_has_no_port_of_a_card_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "wlP9s9")])

    assert knock(0.0) == []


@pytest.mark.parametrize("key", [{"cluster.node_ip": "fe80::1"}, {"cluster.address": "[fe80::1]:6379"}])
def test_a_cluster_over_ipv6_is_refused_by_the_key_that_asks_for_it(key: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(key))}: .*IPv4"):
        load_config(None, flags={"state_dir": tmp_path, **key}, environ={})
