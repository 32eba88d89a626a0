"""One model over two nodes: two network namespaces, the daemon in one, `sparkd ray-node` in the other, and whatever may break between.

The ranks are the stub engine's; those of vLLM are in test_launcher_vllm.py.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import httpx
import pytest

from sparkd.control.watchdog import IDLE_S
from tests.support.pair import SLOW, Pair, Stream, command_of, shared_model, two_sparks
from tests.support.waiting import until

DETECTED_S = 10.0
OUT_S = 20.0
LOSSY_S = 8.0
SILENT_S = 20.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pr")
    models = {
        "pair": shared_model(folder / "model", **SLOW),
        "stuck": shared_model(folder / "model", SPARKD_STUB_HANG_AT="request"),
        "mute": shared_model(folder / "model", SPARKD_STUB_HANG_AT="second"),
    }
    with two_sparks(folder, models) as made:
        yield made


def test_a_model_over_two_nodes_has_a_rank_on_each_and_answers(pair: Pair) -> None:
    first, second = pair.ready()

    assert [(rank["node_id"], rank["rank"], rank["world"]) for rank in (first, second)] == [
        (pair.here.address, 0, 2),
        (pair.there.address, 1, 2),
    ]
    assert second["attempt"] == first["rank_id"]
    assert pair.answers()


def test_only_rank_0_serves_and_no_key_is_in_a_command_line(pair: Pair) -> None:
    first, second = pair.ready()
    commands = {rank["rank"]: command_of(pair.engine_of(rank)).decode().split("\0") for rank in (first, second)}

    assert [("--headless" in commands[rank], "--uds" in commands[rank]) for rank in (0, 1)] == [(False, True), (True, False)]
    assert [address for address, pid in pair.there.listeners() if pid in pair.engines()] == []
    (meet,) = [address for address, pid in pair.here.listeners() if pid in pair.engines()]
    assert meet.split(":")[0] == pair.here.address
    assert f"--master-port\0{meet.split(':')[1]}" in "\0".join(commands[1])
    assert (second["host"], second["port"], second["socket_path"]) == (None, None, None)


@pytest.mark.parametrize(
    "fault", ["the engine of rank 1 is killed", "rank 1 is stopped and does not die", "the engine of rank 0 is killed"]
)
def test_a_rank_that_is_lost_ends_all_and_all_come_back(pair: Pair, fault: str) -> None:
    before = pair.ready()
    stream = Stream(pair).start()
    rank = before[0] if "rank 0" in fault else before[1]
    at_s = time.time()
    os.kill(pair.engine_of(rank), signal.SIGSTOP if "stopped" in fault else signal.SIGKILL)
    reason, after_s = pair.failure(at_s)

    assert reason == ("RankHangs" if "stopped" in fault else "EngineExited")
    assert after_s < DETECTED_S
    assert stream.ended.wait(10), "the client is told"
    assert '"error"' in stream.text
    pair.again(before)


def test_the_raylet_of_the_other_node_dies_and_the_engine_serves_on(pair: Pair) -> None:
    before = pair.ready()
    os.kill(pair.ray_node.pid_of("raylet"), signal.SIGKILL)
    until(lambda: any("NodeUnseen" in told for told in pair.daemon.status()["conditions"]), "it is noticed", 0.2)
    assert pair.answers()
    pair.both()

    assert [rank["pid"] for rank in pair.ready()] == [rank["pid"] for rank in before]
    assert pair.answers()


def test_the_next_daemon_adopts_both_ranks_as_they_run(pair: Pair) -> None:
    before = pair.ready()
    pair.daemon.kill()
    pair.daemon.start()
    pair.daemon.settled()

    assert [rank["pid"] for rank in pair.ready()] == [rank["pid"] for rank in before]
    assert pair.answers()
    reserved = [node["reserved_gib"] for node in pair.daemon.get("/admin/v1/nodes")["nodes"]]
    assert reserved == [3, 3]


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


def test_a_cable_that_is_out_for_20_seconds_ends_in_ready_again(pair: Pair) -> None:
    before = pair.ready()
    stream = Stream(pair).start()
    at_s = time.time()
    pair.there.plug(up=False)
    try:
        reason, after_s = pair.failure(at_s)
        assert stream.ended.wait(10), "the client is told"
        until(lambda: time.time() - at_s > OUT_S, "the cable is out", 0.5)
        assert pair.daemon.model("pair")["state"] == "FAILED"
    finally:
        pair.there.plug(up=True)

    assert (reason, after_s < DETECTED_S, '"error"' in stream.text) == ("NodeLost", True, True)
    pair.again(before)


def test_a_cable_that_loses_packets_is_borne_or_given_up_and_all_come_back(pair: Pair) -> None:
    """Whether the ranks miss each other in that time is chance; that clients, processes and answers are well afterwards is not."""
    before = pair.ready()
    stream = Stream(pair).start()
    pair.there.impair()
    try:
        time.sleep(LOSSY_S)
    finally:
        pair.there.mend()
    pair.both()
    until(pair.answers_quickly, "an answer", 0.5)
    after = pair.ready()

    assert stream.ended.wait(60) and stream.clean
    gone = [rank for rank in before if rank["pid"] not in {one["pid"] for one in after}]
    assert [pid for rank in gone for pid in pair.members(rank)] == []
    assert len(pair.engines()) == 2


def test_unloading_ends_every_process_on_both_nodes(pair: Pair) -> None:
    ranks = pair.ready()
    pair.daemon.unload("pair")
    pair.daemon.wait_for("pair", "STOPPED")

    assert pair.engines() == []
    assert [pid for rank in ranks for pid in pair.members(rank)] == []
    assert not list(pair.ray_node.runtime_dir.rglob(f"{ranks[0]['rank_id']}*"))
    assert [node["reserved_gib"] for node in pair.daemon.get("/admin/v1/nodes")["nodes"]] == [0, 0]


def test_an_engine_that_takes_requests_and_computes_nothing_is_noticed(pair: Pair) -> None:
    pair.both()
    pair.daemon.unload("pair")  # or it may stay for its least residency
    pair.daemon.wait_for("pair", "STOPPED")
    pair.daemon.load("stuck")
    failed = pair.daemon.wait_for("stuck", "FAILED")
    pair.daemon.unload("stuck")
    pair.daemon.wait_for("stuck", "STOPPED")

    assert failed["reason"] == "EngineFrozen"
    assert pair.engines() == []


def test_an_engine_that_hung_while_nobody_asked_is_noticed_though_its_client_gives_up(pair: Pair) -> None:
    pair.both()
    pair.daemon.load("mute")
    pair.daemon.wait_for("mute", "READY")
    at_s = time.time()
    asked = {"model": "mute", "messages": [{"role": "user", "content": "hello"}]}
    with pytest.raises(httpx.ReadTimeout):
        pair.daemon.client.post("/v1/chat/completions", json=asked, timeout=1.0)
    reason, after_s = pair.failure(at_s, "mute")
    pair.daemon.unload("mute")
    pair.daemon.wait_for("mute", "STOPPED")

    assert (reason, after_s < SILENT_S) == ("EngineFrozen", True)
    assert pair.engines() == []


def test_an_engine_does_not_end_because_its_daemon_was_held(pair: Pair) -> None:
    pair.ready()
    at_s = time.time()
    stream = Stream(pair).start()
    time.sleep(3)
    assert pair.daemon.process is not None
    pair.daemon.process.send_signal(signal.SIGSTOP)
    time.sleep(IDLE_S + 2)
    pair.daemon.process.send_signal(signal.SIGCONT)

    assert stream.ended.wait(30)
    assert pair.failures(at_s) == []
    assert "[DONE]" in stream.text
