"""Computes the variables that make one node's rank talk over the right links, each with its reason.

The effect of each on a Spark, and what owners measured with and without: NVIDIA's connect-two-sparks and NCCL playbooks, eugr's launcher,
pulsar's and sparkrun's logs; NCCL's documentation of its environment variables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

from sparkd.fabric.interfaces import LAN, LINK_LOCAL, QSFP, WIFI, Fabric, NetworkInterface
from sparkd.fabric.links import RING, Link, cables_of, rails, topology
from sparkd.hardware import JIT_CAPS

_SOCKET_NAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
# A value that is each node's own stands as a word in a plan, which knows no node: its address, its interface on the rails, its RDMA
# devices.
ADDRESS, LINK, DEVICES = "ADDRESS", "LINK", "DEVICES"


@dataclass(frozen=True, slots=True)
class Setting:
    """value: None where the variable is left unset on purpose
    source: computed, or who said otherwise
    """

    name: str
    value: str | None
    reason: str
    source: str = "computed"


def settings(
    node: Fabric,
    peers: Sequence[Fabric] = (),
    *,
    rdma: bool = True,
    configured: Mapping[str, str] | None = None,
    pipeline: bool = False,
) -> tuple[Setting, ...]:
    """The variables of one rank on `node`, whose other ranks are on `peers`. Interface names, addresses and GIDs are the node's own.

    rdma: False for engines on CPUs
    configured: engine.env and the model's env, which override the node's own process environment as that overrides the computed values
    pipeline: the ranks are stages of a pipeline, which may do without a rail between each two
    """
    # In one order for every node, since each must choose the same rail or LAN for the first contact.
    nodes = sorted([node, *peers], key=lambda member: member.node)
    every = cables_of(nodes)
    cables, shape = tuple(cable for cable in every if node.node in (cable.a, cable.b)), topology(nodes, every)
    computed = [*_sockets(node, peers, cables, shape)]
    if peers and rdma:
        computed += [
            *(_apart(node, reason) if pipeline and (reason := rails(nodes)[1]) else _rdma(node, cables, shape)),
            Setting("NCCL_DEBUG", "INFO", "NCCL's own lines prove which network it uses"),
        ]
    if node.unified:
        # Compilers can take the memory from the engine; elsewhere they may run on all cores.
        cold = "the first start compiles kernels, and 16 to 22 compilers at once have frozen nodes"
        computed += [
            Setting("MAX_JOBS", JIT_CAPS["MAX_JOBS"], cold),
            Setting("FLASHINFER_NVCC_THREADS", JIT_CAPS["FLASHINFER_NVCC_THREADS"], "as MAX_JOBS, for FlashInfer's nvcc"),
        ]
    sources = [("this node's environment", node.environment), ("env in sparkd.yaml", configured or {})]
    return tuple(_overridden(setting, sources) for setting in computed)


def expected(*, rdma: bool) -> dict[str, str]:
    """The values of `settings` on several nodes with sound rails; a word stands for a value that differs by node."""
    names = {"VLLM_HOST_IP": ADDRESS} | {name: f"={LINK}" if name == "NCCL_SOCKET_IFNAME" else LINK for name in _SOCKET_NAMES}
    return names | ({"NCCL_NET": "IB", "NCCL_IB_HCA": f"={DEVICES}", "NCCL_DEBUG": "INFO"} if rdma else {})


def wants_rdma(platform: str, configured: Mapping[str, str]) -> bool:
    """Whether ranks are to talk by RDMA: those on CUDA are, unless the operator names another network for NCCL (NCCL_NET: Socket)."""
    return platform == "cuda" and configured.get("NCCL_NET", "IB") == "IB"


def environment(computed: Sequence[Setting]) -> dict[str, str]:
    """The variables to set, without those that are left unset."""
    return {setting.name: setting.value for setting in computed if setting.value is not None}


def rdma_devices(listed: str) -> tuple[str, ...]:
    """The devices that a value of NCCL_IB_HCA names; none where it names those to leave out."""
    return () if listed.startswith("^") else tuple(name.partition(":")[0] for name in listed.lstrip("=").split(",") if name)


def _overridden(computed: Setting, sources: Sequence[tuple[str, Mapping[str, str]]]) -> Setting:
    setting = computed
    for source, values in sources:
        # The address in the cluster decides where the ranks meet, so cluster.node_ip is the place to change that.
        if computed.name in values and computed.name != "VLLM_HOST_IP":
            setting = Setting(computed.name, values[computed.name], f"instead of {computed.value or 'none'}: {computed.reason}", source)
    return setting


def _sockets(node: Fabric, peers: Sequence[Fabric], cables: Sequence[Link], shape: str) -> Iterator[Setting]:
    """One interface for NCCL's first contact, Gloo and TensorPipe; and the address of the node on it, which vLLM gives to its peers."""
    meeting = _meeting(node, peers, cables, shape)
    if meeting is None:
        if peers:
            reason = "no address of this node is in a subnet with every other: ranks cannot find each other"
            yield from (Setting(name, None, reason) for name in (*_SOCKET_NAMES, "VLLM_HOST_IP"))
        return
    interface, ip, reason = meeting
    yield Setting("VLLM_HOST_IP", str(ip), f"{interface.name}'s address: {reason}")
    roles = ("NCCL's first contact; bulk goes by RDMA", "Gloo, which Ray does not copy right where names differ", "TensorPipe")
    for name, role in zip(_SOCKET_NAMES, roles, strict=True):
        # '=' is NCCL's word for the exact name: without it every interface that begins so is meant. Gloo and TensorPipe know no such word.
        yield Setting(name, f"={interface.name}" if name == "NCCL_SOCKET_IFNAME" else interface.name, f"{role}: {reason}")


def _meeting(node: Fabric, peers: Sequence[Fabric], cables: Sequence[Link], shape: str) -> tuple[NetworkInterface, IPv4Address, str] | None:
    """The interface over which every other rank can be reached, the address there, and why that one."""
    holder = node.holding(node.address) if node.address else None
    if holder and node.address:
        network = next(address.network for address in holder.addresses if address.ip == node.address)
        if all(_reaches(network, peer) or _lives_in(network, peer) for peer in peers):
            return holder, node.address, "it is this node's address in the cluster (cluster.node_ip)"
    if not peers:
        return None
    if len(peers) == 1:
        rail = next((rail for cable in cables for rail in cable.rails if rail.problem is None), None)
        if rail:
            mine = rail.a if _is_of(rail.a, node.twins) else rail.b
            return mine, _within(mine, rail.network), "its peer is at the other end of this rail"
    shared = _shared([node, *peers])
    if shared is None:
        return None
    interface = min(_inside(shared, node), key=_preference)
    if shape == RING and interface.kind == LAN:
        return interface, _within(interface, shared), "in a ring no cable leads to every node, and the LAN does"
    words = {LAN: "the LAN leads to every node", QSFP: "the switch leads to every node"}
    return interface, _within(interface, shared), words.get(interface.kind, "only Wi-Fi leads to every node")


def _shared(nodes: Sequence[Fabric]) -> IPv4Network | None:
    """The subnet that every node is in: that whose worst interface is best, so that all nodes choose the same."""
    networks = {address.network for interface in nodes[0].interfaces for address in interface.addresses if address.network != LINK_LOCAL}
    common = [network for network in networks if all(_reaches(network, node) for node in nodes)]
    worst = {network: max(min(map(_preference, _inside(network, node))) for node in nodes) for network in common}
    return min(common, key=lambda network: (worst[network], network), default=None)


def _preference(interface: NetworkInterface) -> int:
    return (LAN, QSFP, WIFI).index(interface.kind)


def _inside(network: IPv4Network, node: Fabric) -> list[NetworkInterface]:
    places = (*node.lans, *node.twins, *node.wifis)
    return [place for place in places if place.linked and any(address.network == network for address in place.addresses)]


def _reaches(network: IPv4Network, node: Fabric) -> bool:
    return bool(_inside(network, node))


def _lives_in(network: IPv4Network, node: Fabric) -> bool:
    """Whether its address in the cluster is one of the subnet, on whatever interface: a bond or a bridge over the LAN's port is none that
    is a LAN's by its own looks, and the cluster has met there."""
    holder = node.holding(node.address) if node.address else None
    return bool(holder and holder.linked and any((address.ip, address.network) == (node.address, network) for address in holder.addresses))


def _within(interface: NetworkInterface, network: IPv4Network) -> IPv4Address:
    return next(address.ip for address in interface.addresses if address.network == network)


def _is_of(interface: NetworkInterface, others: Iterable[NetworkInterface]) -> bool:
    return any(interface is other for other in others)


def _apart(node: Fabric, reason: str) -> Iterator[Setting]:
    """A pipeline over nodes that RDMA does not link all."""
    if any(twin.rdma for twin in node.twins):
        # Left to itself NCCL takes RDMA on a node with a link and sockets on one without, and the two never meet.
        yield Setting("NCCL_NET", "Socket", f"the stages of a pipeline send little, and NCCL takes one network for all of them: {reason}")
    else:
        yield Setting("NCCL_NET", None, "this node has no RDMA device, so NCCL takes sockets")


def _rdma(node: Fabric, cables: Sequence[Link], shape: str) -> Iterator[Setting]:
    used = [twin for twin in node.twins if any(_is_of(twin, (rail.a, rail.b)) for cable in cables for rail in cable.sound())]
    ends = [twin for twin in node.twins if any(_is_of(twin, cable.a_cage.twins + cable.b_cage.twins) for cable in cables)]
    if not any(twin.rdma for twin in node.twins):
        yield Setting("NCCL_NET", None, "this node has no RDMA device, so NCCL takes sockets")
        return
    # Even where no rail is sound: then NCCL says what is wrong instead of serving at a tenth of the rate.
    yield Setting("NCCL_NET", "IB", "without RDMA, fail rather than fall back to sockets silently")
    if not used:
        yield Setting("NCCL_IB_HCA", None, "no rail is sound for RDMA; `sparkd fabric` says why")
        return
    names = [twin.rdma.name for twin in used if twin.rdma]
    left = [twin.name for twin in ends if twin not in used]
    reason = f"{'the twins that lead' if len(names) > 1 else 'the twin that leads'} to the other nodes; one alone is half of a cable's rate"
    reason += f" (left out, not sound: {', '.join(left)})" if left else ""
    # '=' is NCCL's word for the exact name: without it rocep1s0f0 means rocep1s0f0v0 too.
    yield Setting("NCCL_IB_HCA", f"={','.join(names)}", reason)
    yield _gid(used)
    if shape == RING:
        yield Setting("NCCL_IB_MERGE_NICS", "0", "a ring's two cages lead to two nodes; merged, NCCL falls back to sockets (2.1 GB/s)")
        yield Setting("NCCL_IB_SUBNET_AWARE_ROUTING", "1", "each peer is behind another device (NCCL 2.30 or newer)")
        yield Setting("NCCL_NET_PLUGIN", "none", "a stray network plugin of the image would ignore the two settings above")


def _gid(used: Sequence[NetworkInterface]) -> Setting:
    entries = ", ".join(f"{twin.rdma.name} {twin.gid_index}" for twin in used if twin.rdma)
    return Setting("NCCL_IB_GID_INDEX", None, f"NCCL 2.21 and newer find RoCE v2 with the IPv4 address themselves, here {entries}")
