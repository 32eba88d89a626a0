"""The supervisor over a model of two ranks on two nodes of a fake cluster: READY together, failed together, adopted together."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sparkd.config.config import BackoffSettings
from sparkd.errors import AgentLost, DoesNotFit
from sparkd.state.nouns import OperationState, Want
from tests.sparkd.control.test_supervisor import UP, stage
from tests.support.fakes import FakeCluster, Scene


def pair() -> FakeCluster:
    cluster = FakeCluster()
    cluster.nodes = cluster.agents = ("n", "o")
    return cluster


async def made_ready(scene: Scene) -> None:
    scene.supervisor.want("m", Want.RUNNING, "admin")
    await scene.tick(2)
    scene.cluster.names = ["m"]
    scene.cluster.show_rank(0, progress=UP)
    await scene.tick(3)
    assert scene.state() == "READY"


async def test_both_ranks_are_started_kept_and_shown(tmp_path: Path) -> None:
    async with stage(tmp_path, cluster=pair()) as scene:
        await made_ready(scene)
        view = scene.supervisor.snapshot().models["m"]

        assert [(rank.node_id, rank.rank, rank.world) for rank in view.ranks] == [("n", 0, 2), ("o", 1, 2)]
        assert view.node == "n"
        assert set(scene.store.ranks.handles()) == {rank.rank_id for rank in view.ranks}
        assert "transport n o" in scene.cluster.log


async def test_the_death_of_one_removes_all_and_all_come_back(tmp_path: Path) -> None:
    async with stage(tmp_path, cluster=pair()) as scene:
        await made_ready(scene)
        first = {fact.handle.rank_id for fact in (scene.cluster.ranks or {}).values()}
        scene.cluster.show_rank(1, alive=False, exit_code=-9)
        await scene.tick(1)
        failed = scene.supervisor.snapshot().models["m"]
        await scene.tick(1)
        assert scene.cluster.ranks == {}
        assert scene.store.ranks.handles() == {}
        await scene.tick(2, seconds=10.0)

        assert (failed.state, failed.reason) == ("FAILED", "EngineExited")
        assert scene.state() == "READY"
        second = {fact.handle.rank_id for fact in (scene.cluster.ranks or {}).values()}
        assert (len(second), first & second) == (2, set())


async def test_a_node_without_a_sign_of_life_fails_all_and_nothing_starts_while_it_is_unknown(tmp_path: Path) -> None:
    async with stage(tmp_path, cluster=pair()) as scene:
        await made_ready(scene)
        scene.cluster.unseen = frozenset({"o"})
        await scene.tick(1)
        assert scene.state() == "READY"
        scene.cluster.dark_s = {"o": 7.0}
        await scene.tick(2)
        assert scene.supervisor.snapshot().models["m"].reason == "NodeLost"
        await scene.tick(3, seconds=20.0)
        assert [fact.handle.node_id for fact in (scene.cluster.ranks or {}).values()] == ["o"]
        assert scene.cluster.log.count("place m") == 1

        scene.cluster.unseen, scene.cluster.dark_s = frozenset(), {}
        await scene.tick(1)
        assert scene.cluster.ranks == {}
        await scene.tick(2)
        assert scene.state() == "READY"
        assert {fact.handle.node_id for fact in (scene.cluster.ranks or {}).values()} == {"n", "o"}


async def test_the_next_daemon_adopts_both_or_removes_what_is_left(tmp_path: Path) -> None:
    cluster = pair()
    async with stage(tmp_path, cluster=cluster) as scene:
        await made_ready(scene)
    async with stage(tmp_path, cluster=cluster) as scene:
        assert cluster.expected == {"n", "o"}
        cluster.unseen = frozenset({"o"})
        await scene.tick(2)
        assert (scene.state(), len(cluster.ranks or {})) == ("STOPPED", 2)
        cluster.unseen = frozenset()
        await scene.tick(3)
        assert scene.state() == "READY"
        assert [rank.rank for rank in scene.supervisor.snapshot().models["m"].ranks] == [0, 1]
    cluster.log.clear()
    lost = cluster.of(1).handle.rank_id
    assert cluster.ranks is not None
    del cluster.ranks[lost]
    async with stage(tmp_path, cluster=cluster) as scene:
        await scene.tick(1)
        assert cluster.ranks == {}
        await scene.tick(1)
        assert scene.state() == "LOADING"


async def test_a_question_that_a_dead_rank_never_answers_is_given_up(tmp_path: Path) -> None:
    async with stage(tmp_path, cluster=pair()) as scene:
        never = asyncio.Event()

        async def ask(model: str, timeout_s: float) -> None:
            await never.wait()

        scene.supervisor._effects._ask = ask
        scene.supervisor.want("m", Want.RUNNING, "admin")
        await scene.tick(2)
        scene.cluster.names = ["m"]
        scene.cluster.show_rank(0, progress=UP)
        await scene.tick(2)
        scene.cluster.show_rank(1, halted=True)
        await scene.tick(5)

        view = scene.supervisor.snapshot().models["m"]
        assert (view.state, view.reason, view.failures) == ("FAILED", "RankHangs", 1)
        assert (scene.cluster.log.count("kill m"), scene.cluster.log.count("destroy m")) == (2, 0), "none of them gets its grace"


async def test_unloading_ends_both_whatever_becomes_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkd.control.rank_stopper.ENDING", BackoffSettings(initial_s=1e-9, max_s=1e-9))
    async with stage(tmp_path, cluster=pair()) as scene:
        await made_ready(scene)
        destroy, refusals = scene.cluster.destroy, ["o"]

        async def refusing(fact: object, **how: bool) -> object:
            if refusals and fact.handle.node_id == refusals[0]:  # type: ignore[attr-defined]
                refusals.clear()
                raise AgentLost("The agent of node o did not answer.")
            return await destroy(fact, **how)  # type: ignore[arg-type]

        scene.cluster.destroy = refusing  # type: ignore[method-assign]
        operation = scene.supervisor.want("m", Want.STOPPED, "admin")
        await scene.tick(1)
        assert [fact.handle.node_id for fact in (scene.cluster.ranks or {}).values()] == ["o"]
        await scene.tick(3)

        assert scene.state() == "STOPPED"
        assert scene.operator.operation(operation.id).state is OperationState.SUCCEEDED


@pytest.mark.parametrize(("error", "starts"), [(DoesNotFit("m needs 2 nodes."), True), (AgentLost("o is away."), False)])
async def test_a_node_that_comes_ends_the_wait_of_what_had_no_room(error: DoesNotFit | AgentLost, starts: bool, tmp_path: Path) -> None:
    async with stage(tmp_path, cluster=pair()) as scene:
        scene.cluster.agents = ("n",)
        scene.cluster.place_error = error
        scene.supervisor.want("m", Want.RUNNING, "admin")
        await scene.tick(2)
        assert scene.state() == "FAILED"
        scene.cluster.place_error = None
        await scene.tick(2)
        assert scene.state() == "FAILED"
        scene.cluster.agents = ("n", "o")
        await scene.tick(2)

        assert scene.state() == ("LOADING" if starts else "FAILED")
