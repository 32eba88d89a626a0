"""The variables of each node's ranks: names of that node, reasons, and who may say otherwise."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path

import pytest

from sparkd.config.fields import environment as checked
from sparkd.fabric.environment import ADDRESS, DEVICES, LINK, Setting, environment, expected, settings
from sparkd.fabric.interfaces import OTHER, Fabric
from sparkd.hardware import JIT_CAPS
from tests.sparkd.fabric.test_interfaces import SCENARIOS, nodes_of
from workers.host.network import VARIABLES
from workers.rank.command import build_environment
from workers.rank.spec import RankSpec


def of(found: tuple[Setting, ...]) -> dict[str, Setting]:
    return {one.name: one for one in found}


@pytest.fixture(name="pair")
def _pair(tmp_path: Path) -> list[Fabric]:
    return nodes_of(tmp_path, "pair-different-ports")


def test_a_node_by_itself_gets_no_more_than_the_caps_of_compilers(pair: list[Fabric]) -> None:
    assert environment(settings(pair[0])) == JIT_CAPS
    assert environment(settings(replace(pair[0], unified=False))) == {}


@pytest.mark.parametrize("rdma", [True, False])
def test_a_plan_expects_what_sound_rails_get(pair: list[Fabric], rdma: bool) -> None:
    """In words where it is a node's own."""
    found = environment(settings(pair[0], [pair[1]], rdma=rdma))
    told = {ADDRESS: "192.168.100.11", LINK: "enp1s0f1np1", f"={LINK}": "=enp1s0f1np1", f"={DEVICES}": "=rocep1s0f1,roceP2p1s0f1"}
    assert {name: told.get(value, value) for name, value in expected(rdma=rdma).items()} | JIT_CAPS == found


def test_names_differ_where_the_ports_do(pair: list[Fabric]) -> None:
    a, b = environment(settings(pair[0], [pair[1]])), environment(settings(pair[1], [pair[0]]))

    assert (a["GLOO_SOCKET_IFNAME"], b["GLOO_SOCKET_IFNAME"]) == ("enp1s0f1np1", "enp1s0f0np0")
    assert (a["NCCL_IB_HCA"], b["NCCL_IB_HCA"]) == ("=rocep1s0f1,roceP2p1s0f1", "=rocep1s0f0,roceP2p1s0f0")
    assert (a["VLLM_HOST_IP"], b["VLLM_HOST_IP"]) == ("192.168.100.11", "192.168.100.12")
    assert a["NCCL_NET"] == b["NCCL_NET"] == "IB"


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_is_computed_is_told_may_be_overridden_and_is_of_one_subnet(name: str, tmp_path: Path) -> None:
    nodes = nodes_of(tmp_path, name)
    where = set()
    for node in nodes:
        found = settings(node, [other for other in nodes if other is not node])
        assert all(one.reason and one.source == "computed" for one in found)
        assert {one.name for one in found} - {"VLLM_HOST_IP"} <= set(VARIABLES)
        # What the configuration may say, it may say of each of them.
        checked({one.name: "x" for one in found if one.name != "VLLM_HOST_IP"})
        values = environment(found)
        held = node.holding(IPv4Address(values.get("VLLM_HOST_IP", "0.0.0.0")))
        assert (held.name if held else None) == values.get("GLOO_SOCKET_IFNAME")
        where |= {address.network for address in held.addresses if str(address.ip) == values["VLLM_HOST_IP"]} if held else set()
    assert len(where) == (len(nodes) > 1)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_nodes_whose_lan_is_a_bond_meet_at_their_addresses_in_the_cluster(elsewhere: bool, tmp_path: Path) -> None:
    """Before: no interface that looks like a LAN's has the address, so the ranks got no names."""
    nodes = []
    for number, node in enumerate(nodes_of(tmp_path, "lan-only")[:2], 1):
        address = IPv4Interface(f"10.{7 if elsewhere and number == 2 else 0}.0.{number}/24")
        bond = replace(node.lans[0], name=f"bond{number}", kind=OTHER, physical=False, mac=f"{number}", addresses=(address,))
        bare = tuple(replace(lan, addresses=()) for lan in node.lans)
        nodes.append(replace(node, node=f"n{number}", address=address.ip, lans=bare, wifis=(), others=(bond,)))
    a, b = (environment(settings(one, [other])) for one, other in (nodes, nodes[::-1]))

    names = ("VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    assert [a.get(name) for name in names] == ([None] * 3 if elsewhere else ["10.0.0.1", "bond1", "=bond1"])
    assert [b.get(name) for name in names] == ([None] * 3 if elsewhere else ["10.0.0.2", "bond2", "=bond2"])


def test_nodes_that_share_two_subnets_choose_the_same(tmp_path: Path) -> None:
    """The first has a LAN where the second has Wi-Fi: the switch is better for both."""
    ends = {f"spark_{number}": {"lan": "" if number == 2 else f"192.168.1.{number}/24"} for number in range(1, 5)}
    nodes = nodes_of(tmp_path, "switch-of-four", **ends | {"spark_2": {"lan": "", "wifi": "192.168.1.2/24"}})
    found = [environment(settings(node, [other for other in nodes if other is not node])) for node in nodes]

    assert [values["VLLM_HOST_IP"] for values in found] == [f"10.0.0.{number}" for number in range(1, 5)]


def test_the_index_of_a_gid_is_left_to_nccl(pair: list[Fabric]) -> None:
    there = of(settings(pair[1], [pair[0]]))["NCCL_IB_GID_INDEX"]
    assert there.value is None and "rocep1s0f0 3, roceP2p1s0f0 5" in there.reason


def test_the_nodes_own_environment_counts_over_what_is_computed_and_the_configuration_over_both(pair: list[Fabric]) -> None:
    own = replace(pair[0], environment={"NCCL_IB_HCA": "rocep1s0f1", "NCCL_IB_GID_INDEX": "1", "NCCL_NET": "Socket"})
    found = of(settings(own, [pair[1]], configured={"NCCL_NET": "IB", "MAX_JOBS": "8", "VLLM_HOST_IP": "10.9.9.9", "HF_TOKEN": "secret"}))

    assert (found["NCCL_IB_HCA"].value, found["NCCL_IB_HCA"].source) == ("rocep1s0f1", "this node's environment")
    assert found["NCCL_IB_HCA"].reason.startswith("instead of =rocep1s0f1,roceP2p1s0f1: ")
    assert (found["NCCL_IB_GID_INDEX"].value, found["NCCL_IB_GID_INDEX"].reason[:16]) == ("1", "instead of none:")
    assert (found["NCCL_NET"].value, found["NCCL_NET"].source) == ("IB", "env in sparkd.yaml")
    assert found["MAX_JOBS"].value == "8"
    assert found["VLLM_HOST_IP"].value == "192.168.100.11"
    assert "HF_TOKEN" not in found


def test_a_rank_meets_where_the_node_has_its_address_in_the_cluster(pair: list[Fabric]) -> None:
    lan = replace(pair[0], address=IPv4Address("192.168.1.10"))
    assert environment(settings(lan, [pair[1]]))["GLOO_SOCKET_IFNAME"] == "enP7s7"
    assert "cluster.node_ip" in of(settings(lan, [pair[1]]))["VLLM_HOST_IP"].reason
    # `sparkd ray-node` knows no peers, and its raylet's environment needs the names already.
    assert environment(settings(lan)) == JIT_CAPS | {
        "VLLM_HOST_IP": "192.168.1.10",
        "NCCL_SOCKET_IFNAME": "=enP7s7",
        "GLOO_SOCKET_IFNAME": "enP7s7",
        "TP_SOCKET_IFNAME": "enP7s7",
    }


def test_an_address_on_a_cable_does_not_do_in_a_ring(tmp_path: Path) -> None:
    ring = nodes_of(tmp_path, "ring-of-three")
    on_cable = replace(ring[0], address=IPv4Address("10.0.0.1"))

    assert environment(settings(on_cable, ring[1:]))["VLLM_HOST_IP"] == "192.168.1.1"
    assert environment(settings(on_cable, ring[1:2]))["VLLM_HOST_IP"] == "10.0.0.1"


def test_two_of_a_ring_are_a_pair_with_a_pair_s_settings(tmp_path: Path) -> None:
    ring = nodes_of(tmp_path, "ring-of-three")
    whole, two = environment(settings(ring[0], ring[1:])), environment(settings(ring[0], ring[1:2]))

    assert {"NCCL_IB_MERGE_NICS", "NCCL_IB_SUBNET_AWARE_ROUTING", "NCCL_NET_PLUGIN"} <= whole.keys()
    assert not {"NCCL_IB_MERGE_NICS", "NCCL_IB_SUBNET_AWARE_ROUTING", "NCCL_NET_PLUGIN"} & two.keys()
    assert two["NCCL_IB_HCA"] == "=rocep1s0f0,roceP2p1s0f0"


@pytest.mark.parametrize(
    ("name", "network"),
    [("chain-of-three", "Socket"), ("ring-of-three", "Socket"), ("switch-of-four", "IB"), ("lan-only", None), ("rdma-dead", "Socket")],
)
def test_stages_of_a_pipeline_take_one_network_and_sockets_where_rdma_does_not_link_each_two(
    name: str, network: str | None, tmp_path: Path
) -> None:
    nodes = nodes_of(tmp_path, name)
    for node in nodes:
        found = environment(settings(node, [other for other in nodes if other is not node], pipeline=True))
        assert (found.get("NCCL_NET"), "NCCL_IB_HCA" in found) == (network, network == "IB")
        assert found["NCCL_DEBUG"] == "INFO"


def test_engines_on_cpus_get_the_names_and_nothing_of_rdma(pair: list[Fabric]) -> None:
    found = environment(settings(pair[0], [pair[1]], rdma=False))

    assert not [name for name in found if name.startswith("NCCL_") and name != "NCCL_SOCKET_IFNAME"]
    assert found["TP_SOCKET_IFNAME"] == "enp1s0f1np1"


def test_a_node_without_a_way_to_the_others_is_told_so(tmp_path: Path) -> None:
    nodes = nodes_of(tmp_path, "lan-only", spark_2={"lan": "10.1.1.1/24"})
    found = of(settings(nodes[0], [nodes[1]]))

    assert found["GLOO_SOCKET_IFNAME"].value is None
    assert "ranks" in found["VLLM_HOST_IP"].reason


def test_what_a_node_says_itself_reaches_its_ranks(tmp_path: Path) -> None:
    """The agent's environment is that of the node's `sparkd ray-node`: what a unit's drop-in sets there is inherited."""
    spec = RankSpec(
        rank_id="r",
        model_name="m",
        served_names=("m",),
        model="m",
        generation=1,
        node_id="192.168.1.10",
        rank=0,
        runtime="/python",
        entrypoint="tests.stub",
        run_dir=str(tmp_path),
        log_path="/log",
        config_hash="h",
        platform="cuda",
    )
    said = dict.fromkeys(VARIABLES, "x")

    assert said.items() <= build_environment(spec, said).items()
