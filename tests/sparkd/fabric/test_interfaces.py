"""What a node's network is and what is wrong with it: every scenario of fixtures/fabric as a folder, odd readings, two real nodes."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Interface
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from sparkd.cluster.cluster import Cluster
from sparkd.config.config import Config
from sparkd.fabric.checks import findings, worst
from sparkd.fabric.interfaces import Fabric, NetworkInterface, fabric_of, rdma_mtu, traffic, with_proofs
from sparkd.fabric.links import cables_of, rails, teams, topology, unlinked
from sparkd.fabric.report import report
from tests.support.fabric_tree import expected_of, readings, scenarios, write_nodes
from tests.support.facts import lacking
from tests.support.namespaces import two_nodes
from tests.support.waiting import HUNG_S
from workers.host import network
from workers.host.network import sample

SCENARIOS = scenarios()


def nodes_of(folder: Path, name: str, **more: Mapping[str, Any]) -> list[Fabric]:
    """A scenario's nodes; more: what is different on one, its name with '_'."""
    if not more:
        return [fabric_of(node, raw) for node, raw in readings(name).items()]
    said = {node: (words or {}) | more.get(node.replace("-", "_"), {}) for node, words in SCENARIOS[name]["nodes"].items()}
    return [fabric_of(root.name, sample(root)) for root in write_nodes(folder, said)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario(name: str) -> None:
    assert expected_of(name) == SCENARIOS[name]["expect"]


def test_cages_are_told_by_the_port_and_never_by_the_pci_address(tmp_path: Path) -> None:
    (node, _) = nodes_of(tmp_path, "pair-two-cables")

    cages = {cage.number: [(twin.name, twin.pci, twin.rdma.name if twin.rdma else None) for twin in cage.twins] for cage in node.cages}
    assert cages == {
        0: [("enp1s0f0np0", "0000:01:00.0", "rocep1s0f0"), ("enP2p1s0f0np0", "0002:01:00.0", "roceP2p1s0f0")],
        1: [("enp1s0f1np1", "0000:01:00.1", "rocep1s0f1"), ("enP2p1s0f1np1", "0002:01:00.1", "roceP2p1s0f1")],
    }
    assert [[one.name for one in kind] for kind in (node.lans, node.wifis, node.others)] == [["enP7s7"], ["wlP9s9"], []]


def test_the_pci_function_tells_the_cage_where_neither_driver_nor_name_does(tmp_path: Path) -> None:
    (node, _) = nodes_of(tmp_path, "other-names", spark_1={"no_port_name": True})

    assert [(cage.number, [twin.name for twin in cage.twins]) for cage in node.cages] == [
        (0, ["cable0a", "cable0b"]),
        (1, ["cable1a", "cable1b"]),
    ]


def test_the_address_that_both_ends_have_is_the_one_that_is_told(tmp_path: Path) -> None:
    one, both = "192.168.100.1/24", "192.168.100.7/24"
    nodes = [
        replace(node, cages=tuple(replace(cage, twins=tuple(_with(twin, own, both) for twin in cage.twins)) for cage in node.cages))
        for node, own in zip(nodes_of(tmp_path, "pair-different-ports"), (one, "192.168.100.2/24"), strict=True)
    ]

    problems = {rail.problem for cable in cables_of(nodes) for rail in cable.rails}
    assert [lacking(problem, "both ends", "192.168.100.7") for problem in problems] == [[]]


def _with(twin: NetworkInterface, *addresses: str) -> NetworkInterface:
    return replace(twin, addresses=tuple(map(IPv4Interface, addresses)))


@pytest.mark.parametrize("index", [1, 3, 5])
def test_the_gid_is_the_first_of_roce_v2_with_the_address(index: int, tmp_path: Path) -> None:
    (node,) = nodes_of(tmp_path, "one-cable-port-1", spark_1={"first_gid": index})

    assert {twin.name: twin.gid_index for twin in node.twins} == {
        "enp1s0f0np0": None,
        "enp1s0f1np1": index,
        "enP2p1s0f0np0": None,
        "enP2p1s0f1np1": index,
    }
    (linked, _) = node.cages[1].twins
    assert linked.rdma and linked.rdma.gid_index(IPv4Address("192.168.100.10")) == index
    assert [gid.v2 for gid in linked.rdma.gids[-2:]] == [False, True]


def test_a_file_that_the_kernel_refuses_is_a_value_that_nobody_knows(tmp_path: Path) -> None:
    (node,) = nodes_of(tmp_path, "card-switched-off")

    assert {(twin.carrier, twin.speed_mbps, twin.up, twin.linked) for twin in node.twins} == {(None, None, False, False)}
    assert {one.speed_mbps for one in node.wifis} == {None}


def test_what_sysfs_says_of_another_network_namespace_is_not_believed(tmp_path: Path) -> None:
    """/sys shows the namespace that it was mounted from, `ip` the one that one is in."""
    (root,) = write_nodes(tmp_path, SCENARIOS["one-cable-port-1"]["nodes"])
    links = json.loads((root / "ip-address.json").read_text())
    for link in (link for link in links if link.get("ifname") == "enp1s0f1np1"):
        link |= {"address": "02:00:00:00:00:01", "mtu": 1400, "parentdev": "0000:01:00.1", "phys_port_name": "p1"}
    (root / "ip-address.json").write_text(json.dumps(links))

    (raw,) = (one for one in sample(root)["interfaces"] if one["name"] == "enp1s0f1np1")
    assert {name: raw[name] for name in ("mtu", "carrier", "speed_mbps", "rdma", "pci", "port_name", "physical")} == {
        "mtu": 1400,
        "carrier": True,
        "speed_mbps": None,
        "rdma": [],
        "pci": "0000:01:00.1",
        "port_name": "p1",
        "physical": True,
    }
    assert fabric_of("a", sample(root)).cages[1].twins[0].mtu == 1400


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("exec sleep 1000", "0.2 s"),
        ("echo 'Cannot open netlink socket' >&2; exit 1", "Cannot open netlink socket"),
        ("echo nonsense", "JSON"),
    ],
)
def test_an_ip_that_does_not_answer_is_told_and_waited_for_no_longer(
    script: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ip = tmp_path / "ip"
    ip.write_text(f"#!/bin/sh\n{script}\n")
    ip.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(network, "IP_TIMEOUT_S", 0.2 if "sleep" in script else HUNG_S)

    raw = sample()
    assert raw["trouble"][0].startswith("`ip -details address show`: ") and raw["trouble"][0].endswith(told)
    assert [one["addresses"] for one in raw["interfaces"]] == [[] for _ in raw["interfaces"]]
    found = findings(fabric_of("here", raw))
    assert (worst(found), found[0].check) == ("fail", "readable")


@pytest.mark.parametrize(
    ("models", "unified"),
    [([], True), (["NVIDIA GB10"], True), (["NVIDIA GB10", "NVIDIA RTX 6000"], False)],
)
def test_a_gpu_with_memory_of_its_own_is_told_apart(models: list[str], unified: bool, tmp_path: Path) -> None:
    for number, model in enumerate(models):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 42\n")

    assert sample(tmp_path)["unified"] is unified


def test_this_machine_can_be_read() -> None:
    raw = sample()
    found = report({"here": raw})

    assert (raw["host"], raw["trouble"]) == (socket.gethostname(), [])
    assert "lo" not in {one["name"] for one in raw["interfaces"]}
    assert [(node["node"], node["host"]) for node in found["nodes"]] == [("here", raw["host"])]
    assert found["topology"] == "alone"


@pytest.mark.parametrize(("mtu", "payload"), [(1500, 1024), (9000, 4096), (4100, 2048)])
def test_the_payload_of_an_rdma_packet(mtu: int, payload: int) -> None:
    assert rdma_mtu(mtu) == payload


def test_traffic_is_counted_by_the_rdma_ports(tmp_path: Path) -> None:
    (node,) = nodes_of(tmp_path, "one-cable-port-1")
    (before,) = (twin for twin in node.twins if twin.name == "enp1s0f1np1")
    assert before.rdma and (before.rdma.sent_bytes, before.rdma.received_bytes) == (10**9, 5 * 10**8)
    moved = replace(before, rdma=replace(before.rdma, sent_bytes=10**9 + 7))
    after = replace(node, cages=(replace(node.cages[1], twins=(moved,)),))

    assert traffic(node, node) == dict.fromkeys(("rocep1s0f0", "roceP2p1s0f0", "rocep1s0f1", "roceP2p1s0f1"), 0)
    assert traffic(node, after) == {"rocep1s0f1": 7}
    # A card that came up anew counts from 0.
    assert traffic(after, node)["rocep1s0f1"] == 0


# Several nodes


def test_tensor_parallelism_over_a_ring_needs_a_proof_and_over_two_of_it_does_not(tmp_path: Path) -> None:
    ring = nodes_of(tmp_path, "ring-of-three")

    assert rails(ring)[0] is False and "NCCL test" in rails(ring)[1]
    assert rails(ring, ring_proved=True) == (True, "")
    assert rails(ring[:2]) == (True, "")
    passed = {frozenset(pair) for pair in combinations([node.node for node in ring], 2)}
    assert teams([*with_proofs({node.node: node for node in ring}, passed).values()], 3) == (("spark-1", "spark-2", "spark-3"),)
    assert topology(ring[1:], cables_of(ring[1:])) == "pair"


def test_any_nodes_of_a_switch_may_be_a_team(tmp_path: Path) -> None:
    nodes = nodes_of(tmp_path, "switch-of-four")

    assert [len(teams(nodes, size)) for size in (1, 2, 3, 4)] == [4, 6, 4, 1]
    assert rails(nodes[:1]) == (True, "")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("switch-of-four", {}),
        ("one-cable-port-1", {}),
        ("half-trained", {2: ["MTU 1500", "9000", "mtu: 9000"]}),
        ("lan-only", {2: ["no cable", "LAN", "1 GB/s", "pipeline"]}),
        ("rdma-dead", {2: ["NCCL", "restart", "reseat"]}),
        ("ring-of-three", {3: ["TP=2", "spark-1 + spark-2", "spark-1 + spark-3", "spark-2 + spark-3"]}),
    ],
)
def test_numbers_of_nodes_that_no_team_has_are_told_with_what_helps(name: str, told: dict[int, list[str]], tmp_path: Path) -> None:
    found = unlinked(nodes_of(tmp_path, name))

    assert found.keys() == told.keys()
    assert all(lacking(found[size], *words) == [] and found[size].startswith("spark-1") for size, words in told.items())


def test_engines_on_cpus_need_no_rdma(tmp_path: Path) -> None:
    dead = nodes_of(tmp_path, "rdma-dead")
    split = nodes_of(tmp_path / "split", "half-trained")

    works, why = rails(dead)
    assert (works, lacking(why, "spark-1 and spark-2", "without RDMA")) == (False, [])
    assert rails(dead, rdma=False) == (True, "")
    way = "`env: {NCCL_NET: Socket}`"
    assert (unlinked(dead)[2].count(way), "LAN" in unlinked(dead)[2], way in unlinked(split)[2]) == (1, False, False)
    assert lacking(rails(split, rdma=False)[1], "spark-1 and spark-2", "sound rail", "MTU 1500", "9000") == []


def test_a_four_node_ring_is_no_team(tmp_path: Path) -> None:
    def node(number: int) -> dict[str, Any]:
        near, far = number, number % 4 + 1
        return {
            "cables": [0, 1],
            "lan": f"192.168.1.{number}/24",
            "addresses": {"enp1s0f0np0": f"10.0.{near}.1/24", "enp1s0f1np1": f"10.0.{far}.2/24"},
        }

    roots = write_nodes(tmp_path, {f"spark-{number}": node(number) for number in range(1, 5)})
    ring = [fabric_of(root.name, sample(root)) for root in roots]
    assert topology(ring, cables_of(ring)) == "ring"
    works, why = rails(ring)
    assert (works, lacking(why, "spark-1 and spark-3", "no cable")) == (False, [])


def test_a_node_that_does_not_answer_is_a_finding() -> None:
    (raw,) = readings("one-cable-port-1").values()
    found = report({"192.168.100.10": raw, "192.168.100.11": None})

    assert [node["address"] for node in found["nodes"]] == ["192.168.100.10"]
    assert [(one["check"], one["node"]) for one in found["findings"] if one["verdict"] == "fail"] == [("agent", "192.168.100.11")]


async def test_a_daemon_without_ray_knows_its_own_node(tmp_path: Path) -> None:
    cluster = Cluster(Config(state_dir=tmp_path, runtime_dir=tmp_path), {})
    cluster._here.guard.stop()
    found = await cluster.fabric()

    assert [(node, raw and raw["host"]) for node, raw in found.items()] == [("127.0.0.1", socket.gethostname())]


def test_two_real_nodes_with_a_virtual_cable() -> None:
    """Through `ip`, since /sys of this process is that of the machine."""
    with two_nodes() as ends:
        for near, far in (ends, ends[::-1]):
            with near.entered(), socket.socket() as probe, suppress(OSError):
                probe.settimeout(HUNG_S)
                probe.connect((far.address, 9))
        readings = {}
        for end in ends:
            with end.entered():
                readings[end.address] = sample() | {"host": end.address}
        found = report(readings)
        assert (found["topology"], found["verdict"], found["tensor_parallel"]["all"]) == ("pair", "ok", True)
        (cable,) = found["cables"]
        assert (cable["seen"], [(rail["a"], rail["b"], rail["network"]) for rail in cable["rails"]]) == (
            True,
            [(a, b, f"192.168.{100 + number}.0/24") for number, (a, b) in enumerate(zip(ends[0].twins, ends[1].twins, strict=True))],
        )
        for end in ends:
            set_to = {one["name"]: one["value"] for one in found["environment"][end.address]}
            assert (set_to["VLLM_HOST_IP"], set_to["GLOO_SOCKET_IFNAME"]) == (end.address, end.interface)
            assert "NCCL_NET" not in set_to

        ends[1].plug(up=False)
        with ends[1].entered():
            readings[ends[1].address] = sample() | {"host": ends[1].address}
        assert report(readings)["topology"] == "apart"
