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

from tests.support.facts import lacking
from tests.support.pair import Pair, Stream, shared_model, two_sparks
from tests.support.stream import asking, held
from tests.support.waiting import until


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pr")
    models = {
        "pair": shared_model(folder / "model"),
        "mute": shared_model(folder / "model", SPARKD_STUB_SECOND_HANGS="1"),
    }
    with two_sparks(folder, models) as made:
        yield made


def endless(pair: Pair) -> Stream:
    """A stream that goes on for longer than any test."""
    return Stream(pair, stub={"tokens": 1_000_000, "chunk_interval_s": 0.05}).start()


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
    assert [(rank["node"], rank["rank"], rank["world"]) for rank in before] == [(pair.here.address, 0, 2), (pair.there.address, 1, 2)]
    assert second["attempt"] == first["rank_id"]
    assert pair.answers()

    stream, at_s = Stream(pair, **held(tmp_path / "never")).start(), time.time()
    os.kill(pair.engine_of(second), signal.SIGKILL)
    assert pair.failure(at_s)[0] == "EngineExited"
    assert '"error"' in stream.end(), "the client is told"
    pair.again(before)


@pytest.mark.rest
def test_a_rank_that_is_stopped_and_does_not_die_ends_all_and_all_come_back(pair: Pair) -> None:
    before = pair.ready()
    stream, at_s = endless(pair), time.time()
    os.kill(pair.engine_of(before[1]), signal.SIGSTOP)
    reason, _ = pair.failure(at_s)

    assert reason == "RankHangs"
    assert '"error"' in stream.end(), "the client is told"
    pair.again(before)


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
