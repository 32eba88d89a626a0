"""How ranks on several nodes talk: read off their logs once, when the model is READY, and shown wherever somebody looks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sparkd.admin.fabric import fabric_of
from sparkd.fabric.checks import FAIL, OK, WARN, Finding
from sparkd.fabric.fabric_nodes import FabricNodes
from sparkd.fabric.nccl_log import parse
from sparkd.fabric.transport import proof
from sparkd.state.nouns import RankHandle, Want
from tests.sparkd.control.test_supervisor import UP, make_ready, stage
from tests.support.fabric_tree import readings
from tests.support.fakes import Scene
from workers.agent.actor import Agent
from workers.rank.lifecycle import nccl_lines
from workers.rank.log import STARTED, lines_since

LOGS = sorted((Path(__file__).parents[2] / "fixtures" / "nccl-logs").glob("*.txt"))
TEXT = {path.stem: path.read_text() for path in LOGS}
A, B = "192.168.100.10", "192.168.100.11"
LOST = Finding("network", FAIL, B, "NCCL of m", "network Socket", "2.1 GB/s instead of 20 to 24.")


def handle(node: str) -> RankHandle:
    return RankHandle("m-1", "m", 1, node, 0, 42, 7, "b", None, None, None, None, "c", "/log/m.log", 0.0)


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_what_an_agent_picks_says_as_much_as_the_whole_log(path: Path, tmp_path: Path) -> None:
    text = path.read_text()
    log = tmp_path / "m.log"
    noise = "INFO 11-21 loading\n"
    log.write_text(f"{TEXT['socket-bad']}\n[sparkd] {STARTED} 7: python\n{noise}{text}\n{noise}")
    found = nccl_lines(str(log))

    assert parse(found) == parse(text.splitlines())
    assert noise.strip() not in found


def test_the_lines_of_this_start_are_found_across_a_rotation(tmp_path: Path) -> None:
    log, before = tmp_path / "m.log", tmp_path / "m.log.1"
    assert lines_since(str(log), STARTED, ["x"]) == []
    before.write_text(f"x old\n{STARTED} 1\nx 1\ny\n")
    log.write_text("x 2\nx 3\n")
    assert lines_since(str(log), STARTED, ["x"]) == ["x 1", "x 2", "x 3"]
    assert lines_since(str(log), STARTED, ["x"], most=2) == ["x 2", "x 3"]
    log.write_text(f"x 2\n{STARTED} 2\nx 3\n")
    assert lines_since(str(log), STARTED, ["x"]) == ["x 3"]


def test_an_agent_reads_logs_of_its_own_folder_only(tmp_path: Path) -> None:
    agent = Agent("n", str(tmp_path / "run"), str(tmp_path / "log"), 60.0)
    agent.guard.stop()
    for folder in ("log", "other"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "m.log").write_text("NCCL INFO Using network IB\n")

    assert agent.nccl_lines(str(tmp_path / "log" / "m.log")) == ["NCCL INFO Using network IB"]
    assert agent.nccl_lines(str(tmp_path / "other" / "m.log")) == []


async def proved(logs: Mapping[str, str], scenario: str = "wifi-only", **configured: str) -> list[tuple[str, str, str, str]]:
    raw = dict(zip((A, B), [*readings(scenario).values()] * 2, strict=False))

    async def read(node: str) -> Mapping[str, Any]:
        return raw[node]

    async def lines(one: RankHandle) -> list[str]:
        return logs[one.node_id].splitlines()

    found = await proof([handle(node) for node in logs], FabricNodes(read), lines, configured)
    assert {one.about for one in found} <= {"NCCL of m"}
    return [(one.verdict, one.node, one.check, one.evidence) for one in found]


async def test_ranks_that_use_both_twins_are_proved_and_a_silent_fall_back_comes_first() -> None:
    good = "network IB over rocep1s0f0, roceP2p1s0f0"
    assert await proved({A: TEXT["ib-good"], B: TEXT["ib-good"]}) == [(OK, A, "network", good), (OK, B, "network", good)]

    found = await proved({A: TEXT["ib-good"], B: TEXT["socket-bad"]})
    assert [(verdict, node) for verdict, node, _, _ in found] == [(FAIL, B), (OK, A)]
    assert found[0][3].startswith("network Socket")


async def test_an_engine_without_nccl_and_one_that_was_told_to_use_sockets_are_no_fault() -> None:
    assert await proved({A: "INFO Gloo\n", B: ""}) == []
    assert {verdict for verdict, *_ in await proved({A: TEXT["socket-bad"], B: TEXT["socket-bad"]}, NCCL_NET="Socket")} == {OK}


async def test_what_nccl_says_it_was_asked_for_counts_where_the_node_cannot_be_read() -> None:
    asked = "host:1:1 [0] NCCL INFO NCCL_IB_HCA set to =rocep1s0f0,roceP2p1s0f0\n"

    assert {verdict for verdict, *_ in await proved({A: asked + TEXT["socket-bad"], B: ""}, "no-ip-command")} == {FAIL}


async def test_sockets_on_a_node_that_cannot_be_read_are_not_called_well() -> None:
    told = "network Socket, and the network of its node cannot be read"

    assert (WARN, A, "network", told) in await proved({A: "[0] NCCL INFO Using network Socket\n", B: ""}, "no-ip-command")


async def over_two_nodes(made: Scene) -> None:
    made.cluster.nodes = made.cluster.agents = ("n", B)
    made.supervisor.want("m", Want.RUNNING, "admin")
    await made.tick()
    made.cluster.names = ["m"]
    for rank in (0, 1):
        made.cluster.show_rank(rank, progress=UP)
    await made.tick(3)
    assert made.state() == "READY"
    await made.settle()


async def test_the_verdict_is_an_event_and_stands_in_the_model_and_in_the_fabric(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.cluster.proof = lambda: (LOST,)
        made.cluster.readings = {B: readings("pair-by-subnets")["spark-2"]}
        await over_two_nodes(made)
        await made.tick(2)

        assert made.cluster.log.count(f"transport n {B}") == 1, "once"
        (event,) = [one for one in made.supervisor.journal.events(0, 100) if one.kind == "transport"]
        assert (event.data["verdict"], event.message) == (FAIL, f"fail, {B}, network: network Socket. 2.1 GB/s instead of 20 to 24.")
        (told,) = made.supervisor.snapshot().models["m"].transport
        assert (told["verdict"], told["about"]) == (FAIL, "NCCL of m")
        found = await fabric_of(made.supervisor.registry, made.cluster)  # type: ignore[arg-type]
        assert found["verdict"] == FAIL
        assert [one["node"] for one in found["findings"] if one["about"] == "NCCL of m"] == [B]


async def test_a_model_on_one_node_has_nothing_to_prove(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        await make_ready(made)
        assert not [line for line in made.cluster.log if line.startswith("transport")]
        assert made.supervisor.snapshot().models["m"].transport == ()
