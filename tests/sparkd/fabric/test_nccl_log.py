"""What NCCL's lines prove: every log of fixtures/nccl-logs, as it stands and as vLLM prefixes it, and the verdict with its cause."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from sparkd.fabric.nccl_log import Transport, judge, parse
from tests.support.facts import lacking

LOGS = Path(__file__).parents[2] / "fixtures" / "nccl-logs"
PORT_0 = ("rocep1s0f0", "roceP2p1s0f0")
PORT_1 = ("rocep1s0f1", "roceP2p1s0f1")


@dataclass(frozen=True)
class Case:
    """verdicts: by verdict and check, the facts that stand in its evidence or its cure."""

    found: Transport
    expected: tuple[str, ...]
    verdicts: dict[tuple[str, str], list[str]]


REFUSED = "ibv_modify_qp failed with 22 Invalid argument"
CASES = {
    "ib-good": Case(Transport("IB", PORT_0), PORT_0, {("ok", "network"): ["IB", *PORT_0]}),
    "ib-good-merged-device": Case(Transport(devices=("rocep1s0f0", "rocep1s0f1")), ("rocep1s0f0", "rocep1s0f1"), {}),
    "one-hca-only": Case(
        Transport("IB", ("rocep1s0f1",)), PORT_1, {("fail", "rails"): ["rocep1s0f1", "roceP2p1s0f1", "NCCL_IB_HCA", "13.9"]}
    ),
    "one-rail": Case(
        Transport("IB", (PORT_0[0], PORT_1[0])), PORT_0, {("fail", "rails"): ["rocep1s0f0", "roceP2p1s0f0", "one subnet", "13.9"]}
    ),
    "socket-bad": Case(
        Transport("Socket", socket="enP7s7", errors=("NET/IB : No device found",)),
        PORT_0,
        {("fail", "network"): ["Socket", "enP7s7", "/dev/infiniband", "NCCL_IB_HCA", "NCCL_NET=IB"]},
    ),
    "socket-bad-empty-ib-using": Case(
        Transport("Socket", socket="net1", asked="rocep1s0f0v7", errors=("NET/IB : No device found",)),
        PORT_0,
        {("fail", "network"): ["Socket", "net1", "NCCL_IB_HCA", "rocep1s0f0v7", *PORT_0]},
    ),
    "gid-wrong": Case(
        Transport(
            errors=(
                f"{REFUSED}, dev rocep1s0f0, local GID ::ffff:10.0.1.2, remote GID ::",
                f"{REFUSED}, dev roceP2p1s0f0, local GID ::ffff:10.0.2.2, remote GID ::",
            )
        ),
        PORT_0,
        {("fail", "queue pair"): [*PORT_0, "::ffff:10.0.1.2", "::ffff:10.0.2.2", "NCCL_IB_GID_INDEX"]},
    ),
    "gid-wrong-link-local": Case(
        Transport(errors=(f"{REFUSED}, dev roceP2p1s0f0, local GID ::ffff:10.x.x.94, remote GID fe80::xxxx:xxxx:xxxx:xxxx",)),
        PORT_0,
        {("fail", "queue pair"): ["roceP2p1s0f0", "fe80::xxxx:xxxx:xxxx:xxxx", "IPv4", "NCCL_IB_HCA"]},
    ),
    "wrong-pairing": Case(
        Transport(
            errors=(
                "ibv_modify_qp failed with 110 Connection timed out, dev rocep1s0f0, local GID ::ffff:192.168.102.1, "
                "remote GID ::ffff:192.168.104.1",
            )
        ),
        PORT_0,
        {("fail", "queue pair"): ["110", "::ffff:192.168.104.1", "subnets"]},
    ),
    "hca-mistyped": Case(Transport(errors=("Requested properties for vNic",)), PORT_0, {("fail", "hca"): [*PORT_0, "NCCL_IB_HCA"]}),
    "net-plugin-v10": Case(Transport("NCCL RDMA Plugin v10"), PORT_0, {("ok", "network"): ["Plugin v10"]}),
}


def test_there_is_a_case_for_each_log() -> None:
    assert {path.stem for path in LOGS.glob("*.txt")} == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_a_log(name: str) -> None:
    case, text = CASES[name], (LOGS / f"{name}.txt").read_text()
    for prefix in ("", "dgx-spark-1:144:301 [0] ", "(Worker_TP0 pid=144) dgx-spark-1:144:301 [0] "):
        assert parse([prefix + line for line in text.splitlines(keepends=True)]) == case.found
    findings = judge(case.found, case.expected)
    assert {(one.verdict, one.check) for one in findings} == case.verdicts.keys()
    for verdict, facts in case.verdicts.items():
        told = " ".join(f"{one.evidence} {one.cure}" for one in findings if (one.verdict, one.check) == verdict)
        assert lacking(told, *facts) == []
    assert all((one.cure == "") == (one.verdict == "ok") for one in findings)


def test_sockets_are_fine_where_they_are_meant() -> None:
    found = judge(parse(["NCCL INFO Using network Socket"]), ())

    assert [(one.verdict, one.evidence) for one in found] == [("ok", "network Socket")]


def test_nothing_is_said_of_a_log_without_nccl() -> None:
    found = parse(["INFO 11-21 Loading weights took 274.12 seconds", "", "GPU Direct is a word"])

    assert found == Transport()
    assert judge(found, PORT_0) == ()


def test_a_line_of_any_length_takes_no_longer() -> None:
    assert parse([f"NCCL INFO Using network IB{' ' * 10_000_000}x"]).network == "IB"


def test_what_is_said_first_gives_way_to_what_is_said_last() -> None:
    lines = ["NCCL INFO Assigned NET plugin IB to comm", "NCCL INFO Using network IB", "NCCL INFO Using network Socket"]

    assert parse(lines[:1]).network == "IB"
    assert parse(lines[:2]).network == "IB"
    assert parse(lines).network == "Socket"


@pytest.mark.parametrize(("network", "more"), [("IB", "/GDRDMA(PCI)/Shared"), ("Socket", "")])
def test_what_stands_behind_a_channels_device_is_no_part_of_a_networks_name(network: str, more: str) -> None:
    """sendSetup and recvSetup of nccl/src/transport/net.cc: Shared stands there for what a pipeline's stages send each other."""
    found = parse([f"h:1:2 [0] NCCL INFO Channel 00/1 : 0[0] -> 1[0] [send] via NET/{network}/1{more}"])
    assert found.network == network


def test_no_device_is_a_failure_before_any_network_is_named() -> None:
    (one,) = judge(parse(["NCCL INFO NET/IB : No device found."]), PORT_0)

    assert (one.verdict, lacking(one.evidence, "NET/IB", "no device")) == ("fail", [])
