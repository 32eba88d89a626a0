"""The supervisor over a fake cluster and a fake clock: what it does, what it remembers, whom it lets in."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sparkd.admin.streams import log_of
from sparkd.checkpoint.model_folder import unusable
from sparkd.condition import Condition
from sparkd.config.config import BackoffSettings, parse_model
from sparkd.config.model import ModelConfig
from sparkd.control.ability_lookup import LOOK_AGAIN_S
from sparkd.control.lease import ABANDONED_S, KEEP_EVERY_S, KEPT_S, is_nearly_ready
from sparkd.control.record import Attempt, Record
from sparkd.errors import (
    BadRequest,
    ConfigError,
    Conflict,
    DoesNotFit,
    Draining,
    EngineError,
    LoadRefused,
    ModelCannotLoad,
    ModelFailed,
    ModelLoading,
    ModelUnusable,
    NotFound,
    NoToolParser,
    RankError,
    RouteNotServed,
    TooManyRequests,
    Unavailable,
    UnknownModel,
)
from sparkd.gateway.upstream import ServedModels
from sparkd.state.abilities import GENERATE, POOL, Abilities, RequestNeeds
from sparkd.state.model_state import STARTING, ModelState
from sparkd.state.nouns import Desired, OperationState, Progress, RankFact, Wait, Want
from sparkd.vllm.parsers import Parsers
from tests.sparkd.gateway.fakes import soon
from tests.support.facts import lacking
from tests.support.fakes import Loop, Scene, scene, stage
from tests.support.waiting import HUNG_S
from workers.rank.signatures import diagnose

UP = Progress(phase="serving", server_up=True)


async def make_ready(made: Scene, model: str = "m") -> None:
    made.supervisor.want(model, Want.RUNNING, "admin")
    await made.tick()
    made.cluster.names = [model]
    made.cluster.show(progress=UP)
    await made.tick(3)
    assert made.state(model) == "READY"


async def test_a_load_goes_from_wish_to_ready_and_ready_means_it_answered(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        operation = made.supervisor.want("m", Want.RUNNING, "admin")
        made.supervisor._wake.clear()
        await made.tick()
        assert made.state() == "LOADING"
        assert made.supervisor._wake.is_set(), "the end of an action begins the next tick"
        made.cluster.show(progress=Progress(phase="warming"))
        await made.tick()
        assert made.state() == "WARMING"
        made.cluster.show(progress=UP)
        await made.tick()
        assert (made.state(), made.asked) == ("WARMING", [])

        made.cluster.names = ["m", "gpt-4o"]
        await made.tick()

        assert (made.state(), made.asked) == ("READY", ["m"])
        assert made.operator.operation(operation.id).state is OperationState.SUCCEEDED
        assert made.cluster.log == ["place m", "spawn m"]


@pytest.mark.parametrize("phase", ["ready", "refused"])
async def test_of_an_engine_that_has_failed_there_is_no_cache_and_no_load(phase: str, tmp_path: Path) -> None:
    """That a cache was refused stays said."""
    async with stage(tmp_path) as made:
        await make_ready(made)
        kv = {"phase": phase, "tokens": 100}
        made.cluster.show(progress=replace(UP, kv_tokens=100, kv_gib=1.0, weights_gib=3.0, kv=kv))
        await made.tick()
        view = made.supervisor.snapshot().models["m"]
        assert view.progress is not None and view.progress.kv_tokens == 100 and view.load_s is not None
        made.cluster.show(alive=False, processes=0, exit_code=1)
        await made.tick(2)

        view = made.supervisor.snapshot().models["m"]
        told = view.progress
        assert (view.state, view.load_s) == ("FAILED", None) and told is not None
        assert (told.kv_tokens, told.kv_gib, told.weights_gib) == (None, None, 3.0)
        assert told.kv == (kv if phase == "refused" else None)


async def test_a_server_that_answers_for_another_model_is_not_ready(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.supervisor.want("m", Want.RUNNING, "admin")
        await made.tick()
        made.cluster.names = ["stranger"]
        made.cluster.show(progress=UP)
        await made.tick(2)

        view = made.supervisor.snapshot().models["m"]
        assert (view.state, view.reason, made.asked) == ("FAILED", "WrongModel", [])


async def test_a_question_without_an_answer_is_put_again(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.supervisor.want("m", Want.RUNNING, "admin")
        await made.tick()
        made.cluster.names = ["m"]
        made.cluster.show(progress=UP)

        def refuse(model: str) -> None:
            raise EngineError("not yet")

        made.answer = refuse
        await made.tick(2)
        assert made.state() == "LOADING"
        made.answer = lambda model: None
        await made.tick(2)

        assert made.state() == "READY"
        assert len(made.asked) >= 2


async def test_it_acts_only_after_the_first_reading_and_the_adoption_scan(tmp_path: Path) -> None:
    async with stage(tmp_path, models={"m": {"model": "/nowhere", "preload": True}}) as made:
        made.cluster.ranks = None
        await made.tick(2)
        assert made.cluster.log == []
        made.cluster.ranks = {}
        made.cluster.reading = None
        await made.tick(2)
        assert made.cluster.log == []
        assert not made.supervisor.snapshot().settled
        made.cluster.connected, made.cluster.trouble = False, Condition("RayUnavailable", "Ray cannot be reached.")
        await made.tick()
        waiting = made.supervisor.snapshot().models["m"]
        assert (waiting.message, waiting.wait) == ("Ray cannot be reached.", Wait("RayUnavailable", "Ray cannot be reached."))

        made.cluster.connected, made.cluster.trouble = True, None
        from tests.support.fakes import READING

        made.cluster.reading = READING
        await made.tick()

        assert made.cluster.log == ["place m", "spawn m"]


async def test_the_next_daemon_adopts_what_runs(tmp_path: Path) -> None:
    async with stage(tmp_path) as first:
        await make_ready(first)
        cluster = first.cluster
    cluster.log.clear()

    async with stage(tmp_path, cluster=cluster) as second:
        await second.tick(3)

        assert second.state() == "READY"
        assert (cluster.log, second.asked) == (["hold m"], [])
        assert second.supervisor.snapshot().models["m"].ranks[0].pid == 42


@pytest.mark.parametrize("restarted", [False, True])
async def test_an_engine_whose_socket_was_removed_is_started_again(tmp_path: Path, restarted: bool) -> None:
    async with stage(tmp_path) as scene:
        await make_ready(scene)
        scene.cluster.ranks = {name: replace(fact, deaf=True) for name, fact in (scene.cluster.ranks or {}).items()}
        scene.cluster.names = None
        scene.cluster.log.clear()
        if restarted:
            scene.take_over()
        await scene.tick(12)
        assert (scene.state(), scene.supervisor.snapshot().models["m"].reason) == ("FAILED", "SocketLost")

        await scene.tick(20)
        assert [entry for entry in scene.cluster.log if entry[0] in "dps"] == ["destroy m", "place m", "spawn m"]


async def test_nothing_is_placed_while_an_engine_that_is_no_longer_configured_ends(tmp_path: Path) -> None:
    """It loads until it has gone: the next would count as free what that one is about to take."""
    async with stage(tmp_path) as first:
        first.supervisor.want("m", Want.RUNNING, "admin")
        await first.tick()
        cluster, may_end, destroy = first.cluster, asyncio.Event(), first.cluster.destroy
    cluster.log.clear()

    async def held(fact: RankFact, *, hangs: bool = False) -> Sequence[Mapping[str, Any]]:
        await may_end.wait()
        return await destroy(fact, hangs=hangs)

    cluster.destroy = held  # type: ignore[method-assign]
    async with stage(tmp_path, cluster=cluster, models={"other": {"model": "/nowhere", "preload": True}}) as second:
        await second.tick(3)
        assert (cluster.log, second.state("other")) == ([], "STOPPED")
        may_end.set()
        await second.tick(2)
        assert cluster.log == ["destroy m", "release m", "place other", "spawn other"]


async def test_an_adopted_engine_has_the_load_and_the_time_that_it_had_before(tmp_path: Path) -> None:
    async with stage(tmp_path, min_residency_s=5) as first:
        first.supervisor.want("m", Want.RUNNING, "admin")
        await first.tick()
        await first.tick(seconds=40)
        await make_ready(first)
        before = first.supervisor.snapshot().models["m"]
        load_s = before.load_s
        cluster, now_s = first.cluster, first.clock.now_s
    assert load_s is not None and load_s > 40

    for later_s in (10.0, 30.0):
        async with stage(tmp_path, cluster=cluster, min_residency_s=5) as second:
            second.clock.now_s = now_s + later_s
            await second.tick(3)
            record = second.supervisor.registry.find("m")
            assert (second.state(), second.supervisor.snapshot().models["m"].load_s) == ("READY", load_s)
            assert record.attempt.ready_since_s == pytest.approx(now_s, abs=4.0)
            assert second.supervisor.snapshot().models["m"].since_s == pytest.approx(before.since_s, abs=1.0)


async def test_the_parsers_of_an_adopted_engine_are_those_it_was_started_with(tmp_path: Path) -> None:
    """One of an earlier release says nothing of them, and nothing is claimed."""
    parsers = {"tool": None, "reasoning": "qwen3", "nearest": "hermes"}
    for known in (parsers, None):
        folder = tmp_path / str(known is None)
        folder.mkdir()
        async with stage(folder) as first:
            await make_ready(first)
            cluster = first.cluster
        cluster.show(progress=UP, handle=replace(cluster.only().handle, parsers=known))
        async with stage(folder, cluster=cluster) as second:
            await second.tick(3)
            assert second.supervisor.snapshot().models["m"].parsers == known
            if known is None:
                await ask_with_tools(second)
            else:
                with pytest.raises(NoToolParser, match="hermes"):
                    await ask_with_tools(second)
            await ask_with_tools(second, tools=False)


async def ask_with_tools(made: Scene, *, tools: bool = True) -> None:
    made.limit_wait("m", 0.0)
    async with made.supervisor.lease("m", need=RequestNeeds("/v1/chat/completions", GENERATE, tools)):
        pass


async def test_tools_for_a_model_without_a_parser_load_nothing(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.cluster.expected_parsers = Parsers(nearest="llama3_json")
        with pytest.raises(NoToolParser) as caught:
            await ask_with_tools(made)
        await made.tick(2)

        assert "tool_call_parser: llama3_json" in caught.value.message
        assert (made.state(), made.cluster.log) == ("STOPPED", [])
        assert made.supervisor.registry.find("m").desired.want is Want.STOPPED

        with pytest.raises(ModelLoading):
            await ask_with_tools(made, tools=False)
        assert made.supervisor.registry.find("m").desired.want is Want.RUNNING


@pytest.mark.parametrize("known", [Parsers("hermes"), None], ids=["chosen", "unknown"])
async def test_tools_for_a_model_that_may_have_a_parser_load_it(known: Parsers | None, tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.cluster.expected_parsers = known
        with pytest.raises(ModelLoading):
            await ask_with_tools(made)
        assert made.supervisor.registry.find("m").desired.want is Want.RUNNING


async def test_tools_are_refused_by_the_parsers_of_the_engine_that_starts(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.cluster.expected_parsers = Parsers("hermes")
        made.supervisor.want("m", Want.RUNNING, "admin")
        await made.tick(2)
        for parsers, error in (({"tool": None, "nearest": "hermes"}, NoToolParser), (None, ModelLoading)):
            record = made.supervisor.registry.find("m")
            handles = tuple(replace(handle, parsers=parsers) for handle in record.attempt.handles)
            record.attempt = replace(record.attempt, handles=handles)
            assert record.attempt.handles and record.state in STARTING
            with pytest.raises(error):
                await ask_with_tools(made)


@pytest.mark.parametrize(("noted_gib", "booked_gib"), [(7, 7), (0, 100)], ids=["noted", "by a release that did not note it"])
async def test_an_adopted_engine_is_in_the_book_before_anything_is_placed(noted_gib: int, booked_gib: int, tmp_path: Path) -> None:
    async with stage(tmp_path) as first:
        await make_ready(first)
        cluster = first.cluster
    fact = cluster.only()
    cluster.ranks = {fact.handle.rank_id: replace(fact, handle=replace(fact.handle, memory_gib=noted_gib))}
    cluster.offered, cluster.held = {"n": 100.0}, {}

    async with stage(tmp_path, cluster=cluster) as second:
        await second.supervisor.tick()
        assert cluster.held == {"m": (("n", booked_gib),)}


@pytest.mark.parametrize(
    ("entrypoint", "parsers", "told"),
    [("auto", None, True), ("auto", {"tool": None, "reasoning": None, "nearest": None}, False), ("my.engine", None, False)],
    ids=["an earlier release", "this release", "another engine"],
)
async def test_an_adopted_engine_that_fetches_any_media_is_told_until_it_has_gone(
    entrypoint: str, parsers: dict[str, str | None] | None, told: bool, tmp_path: Path
) -> None:
    models = {"m": {"model": str(tmp_path / "model"), "entrypoint": entrypoint}}

    def reasons(made: Scene) -> list[str]:
        return [condition.reason for condition in made.supervisor.snapshot().conditions]

    async with stage(tmp_path, models=models) as first:
        await make_ready(first)
        cluster = first.cluster
        assert "MediaUnguarded" not in reasons(first)
    cluster.show(progress=UP, handle=replace(cluster.only().handle, parsers=parsers))
    async with stage(tmp_path, cluster=cluster, models=models) as second:
        await second.tick(3)
        assert second.state() == "READY" and ("MediaUnguarded" in reasons(second)) is told
        second.supervisor.want("m", Want.STOPPED, "admin")
        await second.tick(3)
        assert second.state() == "STOPPED" and "MediaUnguarded" not in reasons(second)


async def test_a_rank_whose_configuration_changed_meanwhile_is_replaced(tmp_path: Path) -> None:
    async with stage(tmp_path) as first:
        await make_ready(first)
        cluster = first.cluster
    cluster.log.clear()

    changed = {"m": {"model": str(tmp_path / "model"), "max_model_len": 77}}
    async with stage(tmp_path, cluster=cluster, models=changed) as second:
        await second.tick(3)

        assert cluster.log[:2] == ["destroy m", "release m"]
        assert cluster.log[-2:] == ["place m", "spawn m"]


async def test_a_dead_engine_fails_is_cleared_away_and_started_again_after_its_backoff(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        await make_ready(made)
        made.cluster.show(alive=False, processes=0, exit_code=0)
        made.cluster.log.clear()
        await made.tick()
        view = made.supervisor.snapshot().models["m"]
        assert (view.state, view.reason, view.failures) == ("FAILED", "EngineExited", 1)

        await made.tick()
        assert made.cluster.log == ["destroy m", "release m"]
        await made.tick(seconds=1)
        assert made.state() == "FAILED"
        await made.tick(2, seconds=13)

        assert made.cluster.log[-2:] == ["place m", "spawn m"]


async def test_what_only_its_owner_can_mend_is_not_started_over_and_over(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.supervisor.want("m", Want.RUNNING, "config")
        await made.tick(2)
        refused = diagnose("api_server.py: error: unrecognized arguments: --no-such-flag")
        made.cluster.show(alive=False, processes=0, exit_code=2, diagnosis=refused)
        await made.tick(2)
        view = made.supervisor.snapshot().models["m"]
        assert (view.state, view.reason, view.retry_in_s) == ("FAILED", "UnknownFlag", None)
        assert lacking(view.message, "`sparkd reload`", "`sparkd load m`") == []
        with pytest.raises(ModelFailed) as failed:
            await enter(made, "m")
        assert lacking(failed.value.message, "(UnknownFlag)", "--no-such-flag", "`sparkd ps`") == []
        assert "3599" not in failed.value.message and failed.value.status == 424
        made.cluster.log.clear()
        await made.tick(4, seconds=600)
        assert made.cluster.log == []
        view = made.supervisor.snapshot().models["m"]
        assert (view.memory_gib, view.ranks) == (None, ())

        made.supervisor.want("m", Want.RUNNING, "admin")
        await made.tick()
        assert made.cluster.log[:1] == ["place m"]


async def test_what_no_node_can_ever_hold_rests_as_long_and_takes_no_turn(tmp_path: Path) -> None:
    async with stage(tmp_path, models={"m": {"model": "/m"}, "n": {"model": "/n"}}) as made:
        made.cluster.place_error = DoesNotFit("m needs at least 200 GiB; this node offers 118 GiB.", lasts=True)
        made.supervisor.want("m", Want.RUNNING, "config")
        await made.tick()
        view = made.supervisor.snapshot().models["m"]
        assert (view.state, view.reason, view.retry_in_s) == ("FAILED", "DoesNotFit", None)

        made.cluster.log.clear()
        made.cluster.place_error = None
        made.supervisor.want("n", Want.RUNNING, "admin")
        await made.tick(2, seconds=10)
        assert [line for line in made.cluster.log if line.startswith("place")] == ["place n"]
        assert made.supervisor.registry.find("m").attempt.lasts
        with pytest.raises(ModelFailed, match=r"\(DoesNotFit\)") as refused:
            await enter(made, "m")
        # A time of the next try would say that waiting helps.
        assert not any(digit in refused.value.message for digit in "0123456789") and refused.value.status == 424


async def test_who_brought_a_model_in_is_told_what_mends_it_there(tmp_path: Path) -> None:
    """No file is read again for one that came by `sparkd run MODEL -- FLAGS`, and to load it again gives it the same flags."""
    async with stage(tmp_path) as made:
        made.cluster.place_error = RankError("new cannot be started by the vLLM of its runtime: --no-such-flag", reason="FlagRefused")
        made.operator.add("new", {"model": "/y", "extra_args": ["--seed", "1"]})
        made.supervisor.want("new", Want.RUNNING, "admin")
        await made.tick()
        told = made.supervisor.snapshot().models["new"].message
        assert told is not None and "sparkd reload" not in told
        assert "`sparkd run MODEL --name new -- FLAGS`" in told


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            RankError("m cannot be started: --chat-template: /of/me.", reason="FlagRefused", client_message="It has a bad flag."),
            "It has a bad flag.",
        ),
        (LoadRefused("m cannot be loaded: /models/of me/a.safetensors: o_proj: K=576 is odd. Use nvfp4."), None),
    ],
)
async def test_a_client_hears_why_waiting_does_not_help_and_no_path(error: RankError, told: str | None, tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.cluster.place_error = error
        waiting = asyncio.create_task(enter(made, "m"))
        await made.tick(2)
        for asked in (waiting, enter(made, "m")):
            with pytest.raises(ModelFailed) as raised:
                await asked
            heard = raised.value.message
            assert lacking(heard, f"({error.reason})", "`sparkd ps`", *filter(None, [told])) == []
            assert made.supervisor.registry.find("m").attempt.lasts and "/" not in heard


async def test_backoff_grows_with_each_failure_and_a_stop_forgets_it(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.cluster.place_error = DoesNotFit("m asks for 9 GiB; 4 are free.")
        made.supervisor.want("m", Want.RUNNING, "config")
        waits = []
        for _ in range(4):
            await made.tick()
            view = made.supervisor.snapshot().models["m"]
            assert (view.state, view.reason) == ("FAILED", "DoesNotFit")
            waits.append(view.retry_in_s)
            await made.tick(seconds=view.retry_in_s or 0)
        made.supervisor.want("m", Want.STOPPED, "admin")
        await made.tick()

        assert [later > earlier for earlier, later in pairwise(waits)] == [True, True, True]
        assert (made.state(), made.supervisor.snapshot().models["m"].failures) == ("STOPPED", 0)


async def test_unloading_waits_for_requests_in_flight(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        await make_ready(made)
        async with made.supervisor.lease("m"):
            operation = made.supervisor.want("m", Want.STOPPED, "admin")
            await made.tick(2)
            assert made.state() == "DRAINING"
        await made.tick(3)

        assert made.state() == "STOPPED"
        assert made.cluster.log[-2:] == ["destroy m", "release m"]
        assert made.operator.operation(operation.id).state is OperationState.SUCCEEDED
        assert made.supervisor.snapshot().models["m"].progress is None


async def test_a_placement_under_way_is_cancelled_too(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.cluster.placing.clear()
        made.supervisor.want("m", Want.RUNNING, "admin")
        await made.tick()
        assert made.state() == "PLANNED"
        made.supervisor.want("m", Want.STOPPED, "admin")
        await made.tick(3)

        assert (made.state(), "spawn m" in made.cluster.log) == ("STOPPED", False)


async def test_an_idle_model_is_unloaded_after_its_ttl_and_comes_back_for_a_request(tmp_path: Path) -> None:
    async with stage(tmp_path, models={"m": {"model": "/x", "ttl": 30}}) as made:
        await make_ready(made)
        await made.tick(seconds=31)
        await made.tick(3)
        assert (made.state(), made.supervisor.snapshot().models["m"].wanted_by) == ("STOPPED", "ttl")

        waiting = asyncio.create_task(enter(made, "m"))
        await made.tick()
        made.cluster.show(progress=UP)
        await made.tick(3)

        assert await waiting == "m"


async def enter(made: Scene, name: str) -> str:
    async with made.supervisor.lease(name) as lease:
        return lease.model


async def test_who_is_not_answered_by_a_ready_model_leaves_a_mark_until_somebody_is(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        await make_ready(made)
        record = made.supervisor.registry.find("m")
        for answered in (False, True, False):
            async with made.supervisor.lease("m") as lease:
                lease.answered = answered
            assert record.queue.unanswered is not answered
        async with made.supervisor.lease("m") as lease:
            lease.answered = None
        assert record.queue.unanswered, "the API server refused"
        used_s = record.queue.last_used_s
        made.clock.now_s += 5
        async with made.supervisor.lease("m", probe=True) as lease:
            lease.answered = True
        assert (record.queue.unanswered, record.queue.last_used_s) == (False, used_s), "ours is no use"
        async with made.supervisor.lease("m", probe=True):
            pass
        assert not record.queue.unanswered, "one question leads to no other"


async def test_a_question_is_asked_past_every_limit_and_loads_nothing(tmp_path: Path) -> None:
    async with stage(tmp_path, models={"m": {"model": "/m", "concurrency_limit": 1}}) as made:
        with pytest.raises(Unavailable, match="gone down"):
            async with made.supervisor.lease("m", probe=True):
                pass
        assert made.state() == "STOPPED"
        await make_ready(made)
        async with made.supervisor.lease("m"), made.supervisor.lease("m", probe=True) as lease:
            assert lease.model == "m"


async def test_a_question_takes_nobodys_place_and_no_unload_waits_for_it(tmp_path: Path) -> None:
    async with stage(tmp_path, models={"m": {"model": "/m", "concurrency_limit": 1}}) as made:
        await make_ready(made)
        async with made.supervisor.lease("m", probe=True):
            assert await enter(made, "m") == "m"
            assert made.supervisor.snapshot().models["m"].in_flight == 0
            made.supervisor.want("m", Want.STOPPED, "admin")
            await made.tick(3)
            assert made.state() == "STOPPED", "it may never be answered"


CHAT, EMBED = RequestNeeds("/v1/chat/completions", GENERATE), RequestNeeds("/v1/embeddings", POOL)


async def test_what_a_model_is_not_made_for_loads_nothing(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.cluster.known_abilities = Abilities(frozenset((POOL,)), max_model_len=512)
        with pytest.raises(RouteNotServed):  # the files are looked at for it where no tick has done so
            async with made.supervisor.lease("m", need=CHAT):
                pass
        await made.tick(2)
        assert (made.state(), made.cluster.log) == ("STOPPED", [])
        assert made.supervisor.snapshot().models["m"].max_model_len == 512


async def test_a_request_that_the_gateway_refuses_as_it_begins_to_wait_loads_nothing(tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise BadRequest("The body has no `messages`.")

    async with stage(tmp_path) as made:
        with pytest.raises(BadRequest, match="`messages`"):
            async with made.supervisor.lease("m", on_wait=refuse):
                pass
        await made.tick(2)
        assert (made.state(), made.cluster.log) == ("STOPPED", [])
        await make_ready(made)
        async with made.supervisor.lease("m", on_wait=refuse):  # the engine says what is wrong with it
            pass


async def test_what_its_engine_told_stays_known(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.cluster.known_abilities = Abilities(frozenset((GENERATE,)))
        told, asked = Abilities(frozenset((GENERATE,)), frozenset((EMBED.path,)), 4096), list[tuple[object, ...]]()

        async def served(*arguments: object) -> Abilities:
            asked.append(arguments)
            return told

        made.cluster.served_abilities = served  # type: ignore[method-assign]
        await make_ready(made)
        record = made.supervisor.registry.find("m")
        assert asked == [(record.upstream, made.cluster.known_abilities, ServedModels(("m",)))]
        async with made.supervisor.lease("m", need=EMBED):
            pass
        with pytest.raises(RouteNotServed):
            async with made.supervisor.lease("m", need=CHAT):
                pass
        async with made.supervisor.lease("m", need=CHAT, probe=True):  # READY is found out by asking on every way
            pass
        assert made.supervisor.snapshot().models["m"].max_model_len == 4096
        made.supervisor.want("m", Want.STOPPED, "admin")
        await made.tick(4)
        assert made.state() == "STOPPED"
        with pytest.raises(RouteNotServed):
            async with made.supervisor.lease("m", need=CHAT):
                pass


async def test_a_lease_knows_aliases_and_counts(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        await make_ready(made)
        async with made.supervisor.lease("gpt-4o") as lease:
            assert lease.model == "m"
            assert made.supervisor.snapshot().models["m"].in_flight == 1
        assert made.supervisor.snapshot().models["m"].in_flight == 0
        with pytest.raises(UnknownModel, match="Known models: m"):
            await enter(made, "gpt-5")


async def test_the_concurrency_limit_answers_429(tmp_path: Path) -> None:
    async with stage(tmp_path, models={"m": {"model": "/x", "concurrency_limit": 1}}) as made:
        await make_ready(made)
        async with made.supervisor.lease("m"):
            with pytest.raises(TooManyRequests, match=r"\b1 requests"):
                await enter(made, "m")
        assert await enter(made, "m") == "m"


async def test_the_concurrency_limit_counts_who_waits(tmp_path: Path) -> None:
    """One more is refused at once, and not after the load; all who wait are served."""
    async with stage(tmp_path, models={"m": {"model": "/x", "concurrency_limit": 2}}) as made:
        waiting = [asyncio.create_task(enter(made, "m")) for _ in range(2)]
        await soon(lambda: made.supervisor.snapshot().models["m"].queued == 2)
        with pytest.raises(TooManyRequests):
            await enter(made, "m")
        await make_ready(made)
        assert await asyncio.gather(*waiting) == ["m", "m"]


async def test_a_wait_that_is_too_long_ends_in_503_with_a_loading_object(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.supervisor.want("m", Want.RUNNING, "admin")
        await made.tick()
        made.cluster.show(progress=Progress(phase="loading", fraction=0.5, eta_s=12.3))
        await made.tick()
        made.limit_wait("m", 0.0)
        with pytest.raises(ModelLoading) as raised:
            await enter(made, "m")

        assert raised.value.loading == {"model": "m", "state": "LOADING", "node": "n", "progress": 0.5, "eta_seconds": 12.3}
        assert raised.value.headers() == {"retry-after": "13"}


async def test_a_client_that_leaves_before_anything_acted_does_not_load_the_model(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        await made.tick()
        waiting = asyncio.create_task(enter(made, "m"))
        await soon(lambda: made.supervisor.snapshot().models["m"].want is Want.RUNNING)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await made.tick(2)

        assert made.cluster.log == []
        assert (made.state(), made.supervisor.snapshot().models["m"].queued) == ("STOPPED", 0)


@pytest.mark.parametrize("cancels", [True, False])
async def test_the_last_client_that_leaves_ends_the_load_that_it_caused(tmp_path: Path, cancels: bool) -> None:
    async with stage(tmp_path, cancel_abandoned_loads=cancels) as made:
        waiting = [asyncio.create_task(enter(made, "m")) for _ in range(2)]
        await made.tick(2)
        made.cluster.show(progress=Progress(phase="loading", fraction=0.5))
        await made.tick()
        assert made.state() == "LOADING"

        await left(waiting[0])
        await made.tick(2)
        assert made.state() == "LOADING"
        await left(waiting[1])
        await made.tick(seconds=ABANDONED_S - 1.0)
        assert made.state() == "LOADING"
        await made.tick(4)

        assert made.state() == ("STOPPED" if cancels else "LOADING")
        assert ("destroy m" in made.cluster.log) is cancels


async def test_a_load_that_is_asked_for_again_and_again_goes_on(tmp_path: Path) -> None:
    """By a client whose own limit is below the load's time."""
    async with stage(tmp_path) as made:
        for _ in range(4):
            waiting = asyncio.create_task(enter(made, "m"))
            await made.tick(2)
            made.cluster.show(progress=Progress(phase="loading", fraction=0.5))
            await made.tick(seconds=2 * ABANDONED_S)
            assert made.state() == "LOADING"
            await left(waiting)
            await made.tick(seconds=ABANDONED_S - 10.0)

        assert [line for line in made.cluster.log if line.startswith("place")] == ["place m"]


@pytest.mark.parametrize("why", ["somebody was told to come back", "an operator wishes it", "it is answering"])
async def test_a_load_that_others_count_on_goes_on(tmp_path: Path, why: str) -> None:
    async with stage(tmp_path) as made:
        waiting = asyncio.create_task(enter(made, "m"))
        await made.tick(2)
        made.cluster.show(progress=Progress(phase="loading", fraction=0.5))
        await made.tick()
        if why == "somebody was told to come back":
            made.limit_wait("m", 0.0)
            with pytest.raises(ModelLoading):
                await enter(made, "m")
        elif why == "an operator wishes it":
            made.supervisor.want("m", Want.RUNNING, "admin")
        else:
            made.supervisor.registry.find("m").queue.in_flight += 1
        await left(waiting)
        await made.tick(3)

        assert (made.state(), "destroy m" in made.cluster.log) == ("LOADING", False)


@pytest.mark.parametrize(
    ("state", "eta_s", "still_s", "nearly"),
    [
        (ModelState.LOADING, 60.0, 29.0, True),
        (ModelState.LOADING, 60.0, 30.0, False),
        (ModelState.LOADING, 61.0, 0.0, False),
        (ModelState.LOADING, None, 0.0, False),
        (ModelState.WARMING, None, 29.0, True),
        (ModelState.SIZING, None, 30.0, False),
        (ModelState.FAILED, 15.0, 0.0, False),
    ],
    ids=["little is left", "it stands still", "much is left", "no time", "its weights are loaded", "but it stands still", "it failed"],
)
def test_a_load_is_about_to_end_where_it_moves_and_little_is_left(
    state: ModelState, eta_s: float | None, still_s: float, nearly: bool
) -> None:
    record = Record("m", Desired("m", Want.RUNNING, 1, "request", 0.0), 0.0, 0.0)
    record.state, record.observed.progress, record.observed.last_activity_s = state, Progress(eta_s=eta_s), 100.0 - still_s
    assert is_nearly_ready(record, 100.0) is nearly


@pytest.mark.parametrize(("eta_s", "answered"), [(15.0, True), (400.0, False)], ids=["little is left", "much is left"])
def test_who_has_waited_for_long_is_kept_while_the_load_is_about_to_end(eta_s: float, answered: bool, tmp_path: Path) -> None:
    """300 s of waiting, then 25 more until it is READY."""

    async def go() -> None:
        async with stage(tmp_path) as made:
            loop.clock = made.clock
            waiting = asyncio.create_task(enter(made, "m"))
            await made.tick(2)
            for second in range(322):
                made.cluster.show(progress=Progress("loading", eta_s=eta_s, bytes_done=second))
                await made.tick()
            assert waiting.done() is not answered
            made.cluster.names = ["m"]
            made.cluster.show(progress=UP)
            await made.tick(3)
            if answered:
                assert await waiting == "m"
            else:
                with pytest.raises(ModelLoading):
                    await waiting

    loop = Loop()
    loop.run_until_complete(go())
    loop.close()


def test_nobody_waits_for_ever_for_a_load_that_is_always_about_to_end(tmp_path: Path) -> None:
    async def go() -> None:
        async with stage(tmp_path) as made:
            loop.clock = made.clock
            waiting = asyncio.create_task(enter(made, "m"))
            await made.tick(2)
            for second in range(300 + int(KEPT_S) + int(KEEP_EVERY_S)):
                made.cluster.show(progress=Progress("loading", eta_s=1.0, bytes_done=second))
                await made.tick()
            with pytest.raises(ModelLoading):
                await waiting

    loop = Loop()
    loop.run_until_complete(go())
    loop.close()


async def left(waiting: asyncio.Task[str]) -> None:
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_who_waits_is_told_how_far_it_is(tmp_path: Path) -> None:
    told: list[Any] = []
    async with stage(tmp_path, send_loading_state=True) as made:

        async def ask() -> None:
            async with made.supervisor.lease("m", on_wait=lambda how_far, in_words: told.extend((how_far, in_words))):
                told.append("in")

        waiting = asyncio.create_task(ask())
        await made.tick(2)
        how_far, in_words = told
        assert (how_far()["state"], in_words) == ("LOADING", True)
        made.cluster.names = ["m"]
        made.cluster.show(progress=UP)
        await made.tick(3)
        await waiting
        await ask()

        assert told[2:] == ["in", "in"]


async def test_a_model_without_room_says_who_holds_the_memory(tmp_path: Path) -> None:
    models = {"m": {"model": "/x"}, "big": {"model": "/y", "unlisted": True}, "other": {"model": "/z"}}
    async with stage(tmp_path, models=models) as made:
        await make_ready(made, "other")
        made.supervisor.registry.find("big").attempt = Attempt(0.0, rank_id="big-1", memory_gib=90)
        other = made.supervisor.registry.find("other")
        other.attempt = replace(other.attempt, memory_gib=20)
        made.cluster.place_error = DoesNotFit("no room")
        waiting = asyncio.create_task(enter(made, "m"))
        await made.tick(2)
        with pytest.raises(ModelFailed) as raised:
            await waiting

        told = raised.value.extra()["held_by"]
        assert [(one["model"], one["memory_gib"], one["state"], one["idle_seconds"] >= 0) for one in told] == [
            (None, 90, "STOPPED", True),
            ("other", 20, "READY", True),
        ]


async def test_a_model_that_no_empty_node_could_hold_names_no_holder_of_memory(tmp_path: Path) -> None:
    async with stage(tmp_path, models={"m": {"model": "/x"}, "other": {"model": "/z"}}) as made:
        await make_ready(made, "other")
        made.cluster.place_error = DoesNotFit("max_model_len 99999 is above 8192", lasts=True)
        waiting = asyncio.create_task(enter(made, "m"))
        await made.tick(2)
        with pytest.raises(ModelCannotLoad) as raised:
            await waiting

        assert raised.value.extra() == {}


async def test_a_full_queue_is_refused(tmp_path: Path) -> None:
    async with stage(tmp_path, max_queued_requests=1) as made:
        waiting = asyncio.create_task(enter(made, "m"))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="max_queued_requests"):
            await enter(made, "m")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize(
    ("is_there", "told"),
    [
        (False, ["this node", "`model`", "owner/name"]),
        (True, ["empty", "`model`", "owner/name"]),
    ],
    ids=["not there", "empty"],
)
async def test_who_asks_for_a_model_whose_folder_holds_none_is_refused_at_once_without_its_path(
    is_there: bool, told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, name = tmp_path / "a folder of, mine", "org/m"
    if is_there:
        folder.mkdir()
    async with stage(tmp_path, models={name: {"model": str(folder), "preload": False}}) as made:

        async def look(spec: Any) -> ModelUnusable | None:
            return unusable(spec.model, vllm=True)

        made.cluster.unusable = look
        with caplog.at_level("WARNING"), pytest.raises(ModelFailed) as refused:
            await enter(made, name)
        assert lacking(refused.value.message, f"`sparkd load {name}`", *told) == [] and refused.value.status == 424
        assert str(tmp_path) not in refused.value.message and str(folder) in caplog.text
        assert made.supervisor.registry.find(name).desired.want is Want.STOPPED

        made.cluster.place_error = fault = unusable(str(folder), vllm=True)
        assert fault is not None
        made.supervisor.want(name, Want.RUNNING, "admin")
        await made.tick(2)
        with pytest.raises(ModelFailed) as failed:
            await enter(made, name)
        assert lacking(failed.value.message, *told) == [] and str(tmp_path) not in failed.value.message
        assert failed.value.status == 424
        assert made.supervisor.snapshot().models[name].message == fault.message, "its owner reads the path"


class Looks:
    """A look at a model's hub, which answers once it may."""

    def __init__(self, answer: ModelUnusable | None = None) -> None:
        self.count = 0
        self.may_end = asyncio.Event()
        self._answer = answer

    async def __call__(self, _spec: object) -> ModelUnusable | None:
        self.count += 1
        await self.may_end.wait()
        return self._answer


async def test_requests_share_one_look_at_an_absent_model_and_wait_in_the_queue_meanwhile(tmp_path: Path) -> None:
    models = {name: {"model": f"owner/{name}", "preload": False} for name in ("m", "n")}
    async with stage(tmp_path, models=models, max_queued_requests=20) as made:
        looks = made.cluster.unusable = Looks(ModelUnusable("There is no such model."))
        asking = [asyncio.create_task(enter(made, "m" if number % 2 else "n")) for number in range(20)]
        await soon(lambda: looks.count == 2)

        with pytest.raises(Unavailable, match="max_queued_requests"):
            await enter(made, "m")
        asking[0].cancel()
        await asyncio.wait(asking[:1])
        another = asyncio.create_task(enter(made, "m"))
        await asyncio.sleep(0)
        looks.may_end.set()

        refused = await asyncio.gather(*asking[1:], another, return_exceptions=True)
        assert all(isinstance(error, ModelFailed) for error in refused)
        assert looks.count == 2
        with pytest.raises(ModelFailed):
            await enter(made, "m")
        assert looks.count == 3


async def test_files_are_looked_at_for_a_model_that_is_away_only(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.supervisor.want("m", Want.RUNNING, "admin")
        await made.tick(2)
        assert made.state() == "LOADING"
        looks = made.cluster.unusable = Looks()
        asking = asyncio.create_task(enter(made, "m"))
        await made.settle()
        assert not asking.done() and looks.count == 0
        asking.cancel()


async def test_a_look_that_ends_by_an_error_is_tried_again_after_a_minute(tmp_path: Path) -> None:
    looks = 0

    async def abilities(spec: ModelConfig) -> Abilities:
        nonlocal looks
        looks += 1
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with stage(tmp_path) as made:
        made.cluster.abilities = abilities  # type: ignore[method-assign]
        await made.tick(5, seconds=1.0)
        assert looks == 1
        await made.tick(1, seconds=LOOK_AGAIN_S)
        await made.tick(2, seconds=1.0)
        assert looks == 2
        # Another entry is looked at at once.
        made.supervisor.registry.find("m").hash = "other"
        await made.tick(2, seconds=1.0)
        assert looks == 3


async def test_who_is_looked_at_while_the_daemon_begins_to_end_is_turned_away(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        looks = made.cluster.unusable = Looks()
        asking = asyncio.create_task(enter(made, "m"))
        await soon(lambda: looks.count)
        made.supervisor.drain()
        looks.may_end.set()
        await made.settle()
        assert asking.done() and isinstance(asking.exception(), Draining)


async def test_the_first_look_is_over_once_what_was_adopted_answers(tmp_path: Path) -> None:
    async with stage(tmp_path) as first:
        await make_ready(first)
        cluster = first.cluster
    async with stage(tmp_path, cluster=cluster) as second:
        looking = asyncio.create_task(second.supervisor.first_look(HUNG_S))
        await second.settle()
        assert not looking.done()
        await second.tick(3)
        assert second.state() == "READY" and looking.done()


async def test_a_model_that_was_lent_goes_once_it_is_given_back(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        registry = made.supervisor.registry
        registry.lend("lent", parse_model("lent", {"model": "/x"}, over_admin=False))
        assert set(made.supervisor.snapshot().models) == {"m", "lent"}
        registry.lend("lent", None)
        assert set(made.supervisor.snapshot().models) == {"m"}


async def test_who_asks_while_it_becomes_ready_does_not_wait_for_it_again(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        looked, look_on = asyncio.Event(), asyncio.Event()

        async def look(_spec: object) -> None:
            looked.set()
            await look_on.wait()

        made.cluster.unusable = look
        asking = asyncio.create_task(enter(made, "m"))
        await looked.wait()
        del made.cluster.unusable
        await make_ready(made)
        look_on.set()
        await asking


async def test_what_has_served_serves_again_whatever_it_died_of(tmp_path: Path) -> None:
    """One request may need what this build lacks: others do not rest for an hour because of it."""
    async with stage(tmp_path, backoff__jitter=0) as made:
        await make_ready(made)
        died = diagnose("torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device")
        made.cluster.show(alive=False, processes=0, exit_code=1, diagnosis=died)
        await made.tick()
        view = made.supervisor.snapshot().models["m"]
        assert (view.state, view.reason, view.retry_in_s) == ("FAILED", "NoKernelImage", 10.0)
        assert not made.supervisor.registry.find("m").attempt.lasts


@pytest.mark.parametrize(("reason", "rests"), [("UnknownFlag", False), ("Unlinked", False), ("EngineFrozen", True)])
async def test_a_reload_lets_those_try_again_whose_engine_never_started(reason: str, rests: bool, tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        record = made.supervisor.registry.find("m")
        record.fail(reason, "why", made.clock() + 900)
        made.supervisor._effects.move(record, ModelState.FAILED)
        made.supervisor.reconfigure(made.config)
        assert (record.backoff_until_s > made.clock()) is rests


async def test_a_draining_daemon_takes_nobody_in_and_starts_nothing(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        await make_ready(made)
        made.supervisor.drain()
        with pytest.raises(Draining):
            await enter(made, "m")


async def test_models_are_added_and_removed_while_it_runs(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.operator.add("new", {"model": "/y", "extra_args": ["--seed", "1"]})
        await make_ready(made, "new")
        with pytest.raises(Conflict, match="configuration file"):
            made.operator.add("m", {"model": "/y"})
        with pytest.raises(Conflict):
            made.operator.remove("m")
        with pytest.raises(ConfigError):
            made.operator.add("evil", {"model": "/y", "extra_args": ["--trust-remote-code"]})
        made.operator.remove("new")
        assert "new" not in made.store.wishes.desired(), "one that comes back is not loaded by an old wish"
        await made.tick(4)

        assert set(made.supervisor.snapshot().models) == {"m"}
        assert made.cluster.ranks == {}


async def test_an_added_model_is_known_to_the_next_daemon(tmp_path: Path) -> None:
    async with stage(tmp_path) as first:
        first.operator.add("new", {"model": "/y"})
    async with stage(tmp_path) as second:
        assert set(second.supervisor.snapshot().models) == {"m", "new"}


async def test_a_reload_keeps_engines_whose_settings_did_not_change(tmp_path: Path) -> None:
    from sparkd.config.config import load_config

    async with stage(tmp_path) as made:
        await make_ready(made)
        made.cluster.log.clear()
        flags = {"models": {"m": {"model": str(tmp_path / "model"), "ttl": 5, "aliases": ["gpt-4o"]}, "n": {"model": "/n"}}}
        made.supervisor.reconfigure(load_config(None, flags=flags, environ={}))
        await made.tick(2)
        assert (made.state(), made.cluster.log) == ("READY", [])

        flags["models"]["m"]["max_model_len"] = 99
        made.supervisor.reconfigure(load_config(None, flags=flags, environ={}))
        await made.tick(4)

        assert made.cluster.log == ["destroy m", "release m", "place m", "spawn m"]


async def test_a_model_taken_out_of_the_file_is_stopped_and_forgotten(tmp_path: Path) -> None:
    from sparkd.config.config import load_config

    async with stage(tmp_path) as made:
        await make_ready(made)
        made.supervisor.reconfigure(load_config(None, flags={"models": {"n": {"model": "/n"}}}, environ={}))
        assert made.supervisor.registry.records["m"].desired.want is Want.STOPPED
        await made.tick(4)

        assert set(made.supervisor.snapshot().models) == {"n"}
        assert made.cluster.ranks == {}


@pytest.mark.parametrize(
    ("by", "starts"), [("admin", False), ("ttl", True), ("request", True), ("config", True)], ids=["operator", "ttl", "request", "config"]
)
async def test_preload_respects_an_operators_unload_only(tmp_path: Path, by: str, starts: bool) -> None:
    models = {"m": {"model": "/x", "preload": True}}
    async with stage(tmp_path, models=models) as first:
        first.supervisor.want("m", Want.STOPPED, by)
    async with stage(tmp_path, models=models) as second:
        assert (second.supervisor.snapshot().models["m"].want is Want.RUNNING) is starts


async def test_a_disk_that_is_full_does_not_end_serving(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.store._db.execute("PRAGMA query_only=ON")
        await make_ready(made)

        assert any(condition.reason == "StateNotSaved" for condition in made.supervisor.snapshot().conditions)
        made.store._db.execute("PRAGMA query_only=OFF")
        made.supervisor.want("m", Want.STOPPED, "admin")
        assert made.supervisor.snapshot().conditions == ()


async def test_a_condition_of_the_cluster_and_a_raylet_that_ended_are_events(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        await made.tick()
        journal = made.supervisor.journal
        begun = journal.feed.behind_newest(0)
        made.cluster.trouble = Condition("RayUnavailable", "Ray has ended, 1 s ago.")
        await made.tick()
        made.cluster.trouble = Condition("RayUnavailable", "Ray has ended, 2 s ago.")
        await made.tick()
        made.cluster.trouble, made.cluster.no_raylet = None, frozenset({"o"})
        await made.tick(2)
        cluster = [event for event in journal.events(begun, 50) if event.kind == "cluster"]
        assert [(event.data.get("reason"), event.data.get("node")) for event in cluster] == [
            ("RayUnavailable", None),
            (None, "o"),
            ("RayUnavailable", None),
        ]


async def test_events_wake_those_who_wait_for_them_and_are_in_order(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        journal = made.supervisor.journal
        waiting = [asyncio.create_task(journal.feed.wait_for_more(journal.feed.written)) for _ in range(2)]
        await asyncio.sleep(0)
        begun = journal.feed.behind_newest(0)
        await make_ready(made)
        await asyncio.gather(*waiting)
        seen, _ = await journal.feed.slice_of_events(begun, 50)

        assert [event.data["new"] for event in seen if event.kind == "state"] == ["PLANNED", "LOADING", "READY"]
        assert [event.seq for event in seen] == sorted(event.seq for event in seen)


async def test_unknown_operations_are_said_to_be_unknown(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        with pytest.raises(NotFound):
            made.operator.cancel("nope")


async def test_the_log_is_kept_for_a_model_that_failed(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        await make_ready(made)
        made.cluster.show(alive=False, exit_code=1)
        await made.tick(3)

        assert (await log_of(made.supervisor.registry, made.cluster, "m", None, 100))["text"] == "log of /log/m"


async def test_a_look_that_began_before_a_rank_was_started_does_not_make_it_lost(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        await made.tick()
        made.supervisor.want("m", Want.RUNNING, "admin")
        made.cluster.placing.clear()
        await made.tick()
        observe = made.cluster.observe

        async def slow_observe() -> Any:
            before = await observe()
            made.cluster.placing.set()
            await made.settle()
            return before

        made.cluster.observe = slow_observe  # type: ignore[method-assign]
        await made.tick()

        assert made.state() == "LOADING"
        assert made.supervisor.snapshot().models["m"].failures == 0


async def test_what_an_earlier_daemon_started_on_a_node_that_is_not_seen_yet_is_not_started_a_second_time(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        await make_ready(made)
    ranks = made.cluster.ranks
    made.cluster.ranks, made.cluster.unseen = {}, frozenset("n")
    made.cluster.log.clear()
    async with stage(tmp_path, cluster=made.cluster) as restarted:
        await restarted.tick(5)
        assert (restarted.state(), restarted.cluster.log, restarted.cluster.expected) == ("STOPPED", [], {"n"})
        restarted.cluster.ranks, restarted.cluster.unseen = ranks, frozenset()
        await restarted.tick(3)

        assert (restarted.state(), restarted.cluster.log) == ("READY", ["hold m"])


async def test_a_rank_whose_node_comes_back_before_it_was_started_elsewhere_is_adopted_as_it_runs(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        await make_ready(made)
        ranks, made.cluster.ranks = made.cluster.ranks, {}
        made.cluster.log.clear()
        await made.tick()
        lost = made.supervisor.snapshot().models["m"]
        made.cluster.ranks = ranks
        await made.tick(3)

        assert (lost.state, lost.reason) == ("FAILED", "RankLost")
        assert (made.state(), made.cluster.log) == ("READY", ["hold m"])


async def test_a_rank_whose_node_comes_back_after_it_was_started_elsewhere_ends_and_leaves_the_book_as_it_is(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.cluster.offered = {"n": 100.0}
        await make_ready(made)
        (before,) = (made.cluster.ranks or {}).values()
        made.cluster.ranks = {}
        await made.tick()
        await made.tick(2, seconds=30.0)
        made.cluster.serve("m")
        await made.tick(3)
        again, booked = made.cluster.only(), dict(made.cluster.held)
        assert (made.state(), again.handle.rank_id != before.handle.rank_id) == ("READY", True)
        made.cluster.ranks = {before.handle.rank_id: before, again.handle.rank_id: again}
        await made.tick(3)

        assert made.cluster.only() == again
        assert made.cluster.held == booked == {"m": (("n", 4),)}


async def test_a_model_that_is_wanted_again_while_it_drains_lets_its_waiters_in(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        await make_ready(made)
        async with made.supervisor.lease("m"):
            made.supervisor.want("m", Want.STOPPED, "admin")
            await made.tick()
            assert made.state() == "DRAINING"
            waiting = asyncio.create_task(enter(made, "m"))
            await made.tick(2)

            assert await waiting == "m"
            assert made.state() == "READY"


async def test_a_load_that_failed_gives_its_memory_back(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.cluster.place_error = DoesNotFit("no room")
        made.supervisor.want("m", Want.RUNNING, "admin")
        await made.tick(2)

        assert made.cluster.log == ["place m", "release m"]


@pytest.mark.parametrize(("at_once", "deed"), [(False, "destroy m"), (True, "kill m")])
async def test_the_end_of_the_daemon_ends_every_engine_and_its_connections(tmp_path: Path, at_once: bool, deed: str) -> None:
    async with stage(tmp_path) as made:
        made.supervisor.want("m", Want.RUNNING, "admin")
        await made.tick()
        await make_ready(made, "m")
        record = made.supervisor.registry.find("m")
        assert record.upstream is not None
        await made.supervisor.stop_everything(at_once=at_once)
        assert (made.cluster.log[-1], record.upstream) == (deed, None)
        assert record.desired.want is Want.RUNNING, "for the next start"


async def test_a_tick_that_fails_does_not_end_the_loop(tmp_path: Path) -> None:
    made = scene(tmp_path)
    looks = 0
    observe = made.cluster.observe

    async def stumble() -> Any:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise TypeError("a status file of another release")
        return await observe()

    made.cluster.observe = stumble  # type: ignore[method-assign]
    running = asyncio.create_task(made.supervisor.run())
    made.supervisor._wake.set()
    await made.settle()
    made.supervisor._wake.set()
    await made.settle()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    made.store.close()

    assert looks >= 2


async def test_an_action_that_is_cancelled_before_its_first_step_does_not_keep_its_model_busy(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        await made.tick()
        made.supervisor.want("m", Want.RUNNING, "admin")
        await made.supervisor.tick()
        made.supervisor.want("m", Want.STOPPED, "admin")
        await made.tick(3)
        made.supervisor.want("m", Want.RUNNING, "admin")
        await made.tick()

        assert (made.state(), made.cluster.log[-1]) == ("LOADING", "spawn m")


async def test_a_disk_without_room_is_a_reason_of_its_own_and_its_words_are_kept(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.cluster.place_error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/run/x")  # type: ignore[assignment]
        made.supervisor.want("m", Want.RUNNING, "admin")
        await made.tick(2)

        view = made.supervisor.snapshot().models["m"]
        assert (view.state, view.reason, view.failures) == ("FAILED", "NodeRefused", 1)
        assert "No space left on device (/run/x)" in (view.message or "")


async def test_an_error_that_nobody_expects_fails_its_model_alone_until_the_next_try(tmp_path: Path) -> None:
    models = {name: {"model": str(tmp_path / "model")} for name in ("m", "other")}
    async with stage(tmp_path, models=models, backoff__jitter=0) as made:
        await make_ready(made, "other")
        made.cluster.place_error = TimeoutError()  # type: ignore[assignment]
        made.supervisor.want("m", Want.RUNNING, "admin")
        await made.tick(2)

        view = made.supervisor.snapshot().models["m"]
        assert (view.state, view.reason, view.failures, view.retry_in_s) == ("FAILED", "InternalError", 1, pytest.approx(9, abs=1.5))
        assert made.state("other") == "READY"
        assert any(one.reason == "InternalError" for one in made.supervisor.snapshot().conditions)
        made.cluster.place_error = None
        made.clock.now_s += 10.0
        await made.tick()
        assert made.state() == "LOADING"


async def test_what_will_not_end_is_tried_again_later_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    class Recorded(BackoffSettings):
        def delay_s(self, failures: int, rng: random.Random) -> float:
            tries.append(failures)
            return 0.0

    monkeypatch.setattr("sparkd.control.rank_stopper.ENDING", Recorded())
    async with stage(tmp_path) as made:
        for _ in range(2):
            await make_ready(made)
            made.cluster.immortal = True
            made.supervisor.want("m", Want.STOPPED, "admin")
            await made.tick(3)
            made.cluster.immortal = False
            await made.tick(3)
            assert made.state() == "STOPPED"

    first, second = tries[: tries.index(max(tries)) + 1], tries[tries.index(max(tries)) + 1 :]
    assert first == list(range(1, len(first) + 1)) and len(first) >= 2
    assert second[0] == 1, "what has ended once begins anew"


@pytest.mark.parametrize("returns", ["its time comes", "Ray is connected again", "a node answers again"])
async def test_the_pause_before_the_next_try_to_end_is_no_action_and_ends_early_where_a_node_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returns: str
) -> None:
    monkeypatch.setattr("sparkd.control.rank_stopper.ENDING", BackoffSettings(initial_s=600, max_s=600, jitter=0))
    async with stage(tmp_path) as made:
        await make_ready(made)
        made.cluster.immortal = True
        made.supervisor.want("m", Want.STOPPED, "admin")
        await made.tick(5)
        tries = made.cluster.log.count("destroy m")
        assert (made.state(), made.supervisor.registry.find("m").busy) == ("STOPPING", None)
        await made.tick(5)
        assert made.cluster.log.count("destroy m") == tries == 1
        made.cluster.immortal = False
        if returns == "its time comes":
            await made.tick(seconds=600)
        elif returns == "Ray is connected again":
            made.cluster.connected = False
            await made.tick()
            made.cluster.connected = True
        else:
            made.cluster.unseen = frozenset({"o"})
            await made.tick()
            made.cluster.unseen = frozenset()
        await made.tick(3)
        assert made.state() == "STOPPED"
