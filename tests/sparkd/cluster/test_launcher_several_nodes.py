"""One model over two nodes: two network namespaces, the daemon in one, `sparkd ray-node` in the other, and whatever may break between.

The ranks are the stub engine's; those of vLLM are in tests/e2e/test_two_nodes.py.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkd.control.watchdog import IDLE_S
from tests.support.facts import lacking
from tests.support.pair import Pair, Stream, shared_model, two_sparks
from tests.support.processes import command_of
from tests.support.stream import asking, held
from tests.support.waiting import until

GROWN = 10


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pr")
    models = {
        "pair": shared_model(folder / "model"),
        "stuck": shared_model(folder / "model", SPARKD_STUB_HANG_AT="request"),
        "mute": shared_model(folder / "model", SPARKD_STUB_HANG_AT="second"),
    }
    with two_sparks(folder, models) as made:
        yield made


def endless(pair: Pair) -> Stream:
    """A stream that goes on for longer than any test."""
    return Stream(pair, stub={"tokens": 1_000_000, "chunk_interval_s": 0.05}).start()


def grows(stream: Stream) -> None:
    """Pieces of the answer go on coming."""
    before = stream.text.count("data: ")
    until(lambda: stream.ended.is_set() or stream.text.count("data: ") >= before + GROWN, "more of the answer")


def test_a_wrong_token_joins_nothing_and_says_where_the_right_one_is(pair: Pair, tmp_path: Path) -> None:
    """The second node joined by the right one."""
    config = tmp_path / "sparkd.yaml"
    config.write_text(f"{{state_dir: {tmp_path / 'state'}}}")
    refused = pair.sparkd("join", pair.head, "--token", "-", "--config", str(config), node=pair.there, stdin=f"{'0' * 64}\n")

    assert (refused.returncode, lacking(refused.stderr, "token", "`sparkd token`")) == (4, [])
    assert list((tmp_path / "state").glob("join.*")) == []


def test_a_model_has_a_rank_on_each_node_and_one_that_is_killed_ends_both_and_both_come_back(pair: Pair, tmp_path: Path) -> None:
    before = pair.ready()
    first, second = before
    assert [(rank["node_id"], rank["rank"], rank["world"]) for rank in before] == [(pair.here.address, 0, 2), (pair.there.address, 1, 2)]
    assert second["attempt"] == first["rank_id"]
    assert pair.answers()

    stream, at_s = Stream(pair, **held(tmp_path / "never")).start(), time.time()
    os.kill(pair.engine_of(second), signal.SIGKILL)
    assert pair.failure(at_s)[0] == "EngineExited"
    assert '"error"' in stream.end(), "the client is told"
    pair.again(before)


@pytest.mark.rest
def test_only_rank_0_serves_and_no_key_is_in_a_command_line(pair: Pair) -> None:
    first, second = pair.ready()
    commands = {rank["rank"]: command_of(pair.engine_of(rank)) for rank in (first, second)}

    assert [("--headless" in commands[rank], "--uds" in commands[rank]) for rank in (0, 1)] == [(False, True), (True, False)]
    assert [address for address, pid in pair.there.listeners() if pid in pair.engines()] == []
    (meet,) = [address for address, pid in pair.here.listeners() if pid in pair.engines()]
    assert meet.split(":")[0] == pair.here.address
    assert f"--master-port\0{meet.split(':')[1]}" in "\0".join(commands[1])
    assert (second["host"], second["port"], second["socket_path"]) == (None, None, None)


@pytest.mark.rest
@pytest.mark.parametrize("fault", ["rank 1 is stopped and does not die", "the engine of rank 0 is killed"])
def test_a_rank_that_is_lost_ends_all_and_all_come_back(pair: Pair, fault: str) -> None:
    before = pair.ready()
    stream, at_s = endless(pair), time.time()
    rank = before[0] if "rank 0" in fault else before[1]
    os.kill(pair.engine_of(rank), signal.SIGSTOP if "stopped" in fault else signal.SIGKILL)
    reason, _ = pair.failure(at_s)

    assert reason == ("RankHangs" if "stopped" in fault else "EngineExited")
    assert '"error"' in stream.end(), "the client is told"
    pair.again(before)


@pytest.mark.rest
def test_the_raylet_of_the_other_node_dies_and_the_engine_serves_on(pair: Pair) -> None:
    before = pair.ready()
    os.kill(pair.ray_node.pid_of("raylet"), signal.SIGKILL)
    until(lambda: any("NodeUnseen" in told for told in pair.daemon.status()["conditions"]), "it is noticed", 0.2)
    assert pair.answers()
    pair.both()

    assert [rank["pid"] for rank in pair.ready()] == [rank["pid"] for rank in before]
    assert pair.answers()


@pytest.mark.rest
def test_the_next_daemon_adopts_both_ranks_as_they_run(pair: Pair) -> None:
    before = pair.ready()
    pair.daemon.kill()
    pair.daemon.start()
    pair.daemon.settled()

    assert [rank["pid"] for rank in pair.ready()] == [rank["pid"] for rank in before]
    assert pair.answers()
    reserved = [node["reserved_gib"] for node in pair.daemon.get("/admin/v1/nodes")["nodes"]]
    assert reserved == [3, 3]


@pytest.mark.rest
def test_a_rank_that_dies_while_there_is_no_daemon_ends_the_others(pair: Pair) -> None:
    before = pair.ready()
    pair.daemon.kill()
    os.kill(pair.engine_of(before[1]), signal.SIGKILL)
    pair.daemon.start()
    pair.daemon.settled()

    after = pair.ready()
    assert {rank["pid"] for rank in after}.isdisjoint(rank["pid"] for rank in before)
    assert len(pair.engines()) == 2
    assert pair.answers()


@pytest.mark.rest
def test_a_cable_that_is_out_ends_in_ready_again(pair: Pair) -> None:
    before = pair.ready()
    stream, at_s = endless(pair), time.time()
    pair.there.plug(up=False)
    try:
        reason, _ = pair.failure(at_s)
        assert '"error"' in stream.end(), "the client is told"
        # Until the cable is in again one node is missing.
        assert pair.daemon.model("pair")["state"] != "READY"
    finally:
        pair.there.plug(up=True)

    assert reason == "NodeLost"
    pair.again(before)


@pytest.mark.rest
def test_a_cable_that_loses_packets_is_borne_or_given_up_and_all_come_back(pair: Pair) -> None:
    """Whether the ranks miss each other in that time is chance; that clients, processes and answers are well afterwards is not."""
    before = pair.ready()
    stream = endless(pair)
    pair.there.impair()
    try:
        grows(stream)
    finally:
        pair.there.mend()
    pair.both()
    until(pair.answers_quickly, "an answer", 0.5)
    after = pair.ready()

    gone = [rank for rank in before if rank["pid"] not in {one["pid"] for one in after}]
    if gone:
        stream.end()
        assert stream.clean
    else:
        grows(stream)
    assert [pid for rank in gone for pid in pair.members(rank)] == []
    assert len(pair.engines()) == 2
    pair.unloaded("pair")


@pytest.mark.rest
def test_unloading_ends_every_process_on_both_nodes(pair: Pair) -> None:
    ranks = pair.ready()
    pair.unloaded("pair")

    assert pair.engines() == []
    assert [pid for rank in ranks for pid in pair.members(rank)] == []
    assert not list(pair.ray_node.runtime_dir.rglob(f"{ranks[0]['rank_id']}*"))
    assert [node["reserved_gib"] for node in pair.daemon.get("/admin/v1/nodes")["nodes"]] == [0, 0]


@pytest.mark.rest
def test_an_engine_that_takes_requests_and_computes_nothing_is_noticed(pair: Pair) -> None:
    pair.both()
    pair.unloaded("pair")  # or it may stay for its least residency
    pair.daemon.load("stuck")
    failed = pair.daemon.wait_for("stuck", "FAILED")
    pair.unloaded("stuck")

    assert failed["reason"] == "EngineFrozen"
    assert pair.engines() == []


@pytest.mark.rest
def test_an_engine_that_hung_while_nothing_was_asked_is_noticed_though_its_client_gives_up(pair: Pair) -> None:
    pair.both()
    pair.unloaded("pair")
    pair.daemon.load("mute")
    pair.daemon.wait_for("mute", "READY")
    at_s = time.time()
    with asking(pair.daemon.port, "mute"):
        until(lambda: pair.daemon.model("mute").get("in_flight"), "it waits for its answer")
    reason, _ = pair.failure(at_s, "mute")
    pair.unloaded("mute")

    assert reason == "EngineFrozen"
    assert pair.engines() == []


@pytest.mark.rest
def test_an_engine_does_not_end_because_its_daemon_was_held(pair: Pair) -> None:
    pair.ready()
    stream, at_s = endless(pair), time.time()
    assert pair.daemon.process is not None
    pair.daemon.process.send_signal(signal.SIGSTOP)
    held_s = time.monotonic()
    until(lambda: time.monotonic() - held_s > IDLE_S + 2, "longer than an engine may be silent", 0.5)
    pair.daemon.process.send_signal(signal.SIGCONT)

    pair.both()
    grows(stream)
    assert not stream.ended.is_set()
    assert pair.failures(at_s) == []
    pair.unloaded("pair")
