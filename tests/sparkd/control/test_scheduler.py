"""Whose turn it is, and who makes room: the pure decision as a table, and what the supervisor makes of it over fakes."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkd.cluster.node_tracker import Observation
from sparkd.condition import Condition
from sparkd.config.config import load_config
from sparkd.config.groups import GroupSettings, Ties
from sparkd.control.evictions import EXCLUDED, NO_ROOM
from sparkd.control.load_gate import AGENT_SILENT, RAY_STARTS
from sparkd.control.record import Record
from sparkd.control.request_queue import PROMISE_S
from sparkd.control.scheduler import ASKED_FIRST, ENDS, LEAVE, LOADS, PASS, STARTED_FIRST, STAY, UNCLAIMED, Schedule
from sparkd.errors import ConfigError, LoadRefused, ModelFailed, ModelLoading, Unavailable
from sparkd.state.memory_book import Lack, MemoryBook
from sparkd.state.model_state import ModelState
from sparkd.state.nouns import OperationState, Reading, Wait, Want
from sparkd.state.snapshot import NodeView
from tests.sparkd.control.test_supervisor import left
from tests.support.facts import lacking
from tests.support.fakes import READING, Scene, scene, stage
from tests.support.model_records import record_of, scheduled

NOW_S = 1000.0
NAMES = {name: name for name in "abcdef"}


def there(name: str, **changes: Any) -> Record:
    """A model that serves."""
    return record_of(name, **({"state": ModelState.READY} | changes))


def stays(name: str, until_s: float, ready_since_s: float = NOW_S, load_s: float = 0.0, **changes: Any) -> Record:
    """A model that serves, was last used at until_s, and has taken another one's place if load_s is given."""
    return there(name, last_used_s=until_s, ready_since_s=ready_since_s, load_s=load_s, takes_turns=load_s > 0, **changes)


def waits(name: str, gib: int | None = 10, requested_since_s: float = 900.0, **changes: Any) -> Record:
    lack = None if gib is None else Lack(gib)
    given: dict[str, Any] = {"state": ModelState.STOPPED, "claims": True, "lack": lack, "requested_since_s": requested_since_s}
    return record_of(name, **(given | changes))


def decided(*models: Record, ties: Ties | None = None, offered: float = 20, **held: int) -> Schedule:
    book = MemoryBook({"n": offered}, {name: (("n", gib),) for name, gib in held.items()})
    return scheduled(*models, book=book, ties=ties)


def reason(whose: Schedule, name: str) -> tuple[str, tuple[str, ...], float | None]:
    """Its reason, the models, and for how many seconds they may stay."""
    wait = whose.waits[name]
    seconds = re.search(r"another (\d+) s", wait.message)
    return wait.reason, wait.models, float(seconds[1]) if seconds else None


def test_who_claims_goes_first_then_who_asked_first() -> None:
    found = decided(
        waits("a", claims=False, requested_since_s=1), waits("b", requested_since_s=7), waits("c", requested_since_s=5), waits("d")
    )
    assert (found.next_to_start, found.queue) == ("c", ("c", "b", "d", "a"))
    assert found.waits.keys() == {"a", "b", "d"}


@pytest.mark.parametrize(
    ("others", "held", "leave"),
    [
        ([there("a"), there("b")], {"a": 10, "b": 10}, ["a"]),
        ([there("a", priority=60), there("b")], {"a": 10, "b": 10}, ["b"]),
        ([there("a", in_flight=1), there("b")], {"a": 10, "b": 10}, ["b"]),
        ([there("a", last_used_s=9), there("b")], {"a": 10, "b": 10}, ["b"]),
        ([there("a", pinned=True), there("b", in_flight=3)], {"a": 10, "b": 10}, ["b"]),
        ([there("a"), there("b", priority=90)], {"a": 4, "b": 16}, ["b"]),
        ([there("a", priority=1), there("b"), there("d")], {"a": 2, "b": 9, "d": 9}, ["a", "b"]),
        ([stays("a", NOW_S + 5), there("b", in_flight=1)], {"a": 10, "b": 10}, ["b"]),
        ([there("a", state=ModelState.DRAINING, yields=True), there("b")], {"a": 10, "b": 10}, ["a"]),
    ],
    ids=["any", "priority", "busy", "used", "pinned", "only one is enough", "the fewest", "residency", "who leaves already"],
)
def test_those_go_that_nobody_would_miss(others: list[Record], held: dict[str, int], leave: list[str]) -> None:
    found = decided(waits("c"), *others, **held)
    assert (found.next_to_start, dict(found.victims)) == (None, dict.fromkeys(leave, "c"))
    assert (found.waits["c"].reason, lacking(found.waits["c"].message, "10 GiB")) == (LEAVE, [])


@pytest.mark.parametrize("stay_s", [42, 1])
def test_nobody_goes_before_its_time_and_who_asked_later_waits_behind(stay_s: float) -> None:
    found = decided(waits("c"), waits("d", gib=1, requested_since_s=950), stays("a", NOW_S + stay_s), a=16)
    assert (found.next_to_start, found.victims, found.queue) == (None, {}, ("c", "d"))
    assert reason(found, "c") == (STAY, ("a",), stay_s)
    assert reason(found, "d") == (ASKED_FIRST, ("c",), None)


@pytest.mark.parametrize(
    ("ready_s_ago", "load_s", "lost_load_s", "stay_s"),
    [(1, 0, 0, None), (1, 39, 0, 38), (39, 39, 0, None), (39, 39, 154, 154), (193, 39, 154, None)],
    ids=["no turns yet", "its load took longer", "it has stayed as long", "the other's load failed", "it has stayed for both"],
)
def test_an_idle_model_goes_at_once_unless_two_take_each_others_place(
    ready_s_ago: float, load_s: float, lost_load_s: float, stay_s: float | None
) -> None:
    idle = stays("a", NOW_S, NOW_S - ready_s_ago, load_s)
    found = decided(waits("c", lost_load_s=lost_load_s), idle, a=16)
    assert dict(found.victims) == ({"a": "c"} if stay_s is None else {})
    assert reason(found, "c") == (LEAVE if stay_s is None else STAY, ("a",), stay_s)


@pytest.mark.parametrize(("ready_s_ago", "leave"), [(77, []), (78, ["a", "b"])])
def test_two_that_go_together_stay_for_the_loads_of_both(ready_s_ago: float, leave: list[str]) -> None:
    idle = [stays(name, NOW_S, NOW_S - ready_s_ago, 39) for name in "ab"]
    assert sorted(decided(waits("c", 20), *idle, a=10, b=10).victims) == leave


def test_a_model_that_is_leaving_already_holds_nothing_up() -> None:
    leaves = stays("a", NOW_S + 60, load_s=39, state=ModelState.DRAINING, yields=True)
    assert sorted(decided(waits("c", 20), leaves, there("b"), a=10, b=10).victims) == ["a", "b"]


def test_what_nobody_asks_for_waits_and_lets_others_pass() -> None:
    found = decided(waits("c", claims=False), waits("d", gib=1, claims=False, requested_since_s=950), there("a"), a=16)
    assert (found.next_to_start, found.victims) == ("d", {})
    assert reason(found, "c") == (UNCLAIMED, (), None)


@pytest.mark.parametrize(("room_gib", "first"), [(9.0, None), (10.0, "c")])
def test_the_first_waits_for_memory_that_returns_to_its_nodes_only(room_gib: float, first: str | None) -> None:
    models = waits("c"), waits("d", gib=1, requested_since_s=950)
    found = scheduled(*models, book=MemoryBook({"n": 20}, {}, (), {"n": room_gib}))
    assert (found.next_to_start, found.queue, "c" in found.waits) == (first, ("c", "d"), first is None)
    elsewhere = scheduled(*models, book=MemoryBook({"n": 20, "o": 20}, {}, (), {"n": room_gib}))
    assert elsewhere.next_to_start == "c"


def test_who_would_wait_in_vain_is_told_so_and_holds_up_nobody() -> None:
    found = decided(waits("c"), waits("d", gib=1, requested_since_s=950), there("a", pinned=True), a=16)
    assert (found.next_to_start, found.queue) == ("d", ("d",))
    assert (found.rejected["c"].reason, found.rejected["c"].models) == (NO_ROOM, ("a",))


@pytest.mark.parametrize(
    ("state", "want"),
    [(ModelState.STOPPING, Want.STOPPED), (ModelState.LOADING, Want.RUNNING), (ModelState.FAILED, Want.RUNNING)],
)
def test_what_is_on_its_way_is_waited_for(state: ModelState, want: Want) -> None:
    found = decided(waits("c"), there("a", state=state, want=want), a=16)
    assert (found.next_to_start, found.victims, found.rejected) == (None, {}, {})
    assert reason(found, "c") == (PASS, (), None)


@pytest.mark.parametrize(
    "changes",
    [{"backoff_until_s": NOW_S + 1}, {"unseen": True}, {"busy": "stop"}, {"config_hash": None}, {"want": Want.STOPPED}, {"ranks": None}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_cannot_start_now_holds_up_nobody(changes: dict[str, Any]) -> None:
    assert decided(waits("c", **changes), waits("d", requested_since_s=950)).next_to_start == "d"
    assert decided(waits("c", backoff_until_s=NOW_S), waits("d", requested_since_s=950)).next_to_start == "c", "its back-off is over"


def test_over_several_nodes() -> None:
    book = MemoryBook({"n": 20, "o": 20}, {"a": (("n", 15),), "b": (("n", 4), ("o", 4)), "d": (("o", 12),)})
    models = {"c": waits("c", lack=Lack(12, 2)), "a": there("a"), "b": there("b"), "d": there("d")}
    assert dict(scheduled(*models.values(), book=book).victims) == {"a": "c", "d": "c"}
    models["a"] = there("a", pinned=True)
    refusal = scheduled(*models.values(), book=book).rejected["c"]
    assert (refusal.reason, lacking(refusal.message, "12 GiB on each of 2 nodes")) == (NO_ROOM, [])
    assert lacking(refusal.message, "12 GiB", "2 nodes") == []


def test_rivals_go_even_where_there_is_room_and_companions_with_them() -> None:
    ties = GroupSettings(exclude=(("a", "c"),), accompany=(("a", "b"), ("c", "d"))).ties(NAMES)
    found = decided(waits("c", gib=None), there("a"), there("b"), there("d"), there("e"), ties=ties, a=1, b=1, d=1, e=1)
    assert dict(found.victims) == {"a": "c", "b": "c"}
    assert reason(found, "c") == (LEAVE, ("a", "b"), None)
    pinned = decided(waits("c", gib=None), there("a"), there("b", pinned=True), ties=ties, a=1, b=1)
    assert (pinned.rejected["c"].reason, pinned.rejected["c"].models) == (EXCLUDED, ("a",))


def test_a_companion_makes_no_room_for_its_own() -> None:
    ties = GroupSettings(accompany=(("c", "a"),)).ties(NAMES)
    assert dict(decided(waits("c"), there("a"), there("b"), ties=ties, a=10, b=10).victims) == {"b": "c"}


def test_groups_name_models_and_do_not_contradict_each_other(tmp_path: Path) -> None:
    model = {"model": str(tmp_path)}
    models = {"a": model, "b": model | {"aliases": ["bee"]}}
    with pytest.raises(ConfigError, match=r"groups\.exclude.*'x'.*a, b, bee"):
        load_config(None, flags={"models": models, "groups.exclude": [["a", "x"]]}, environ={})
    with pytest.raises(ConfigError, match=r"a and b exclude.*accompany"):
        load_config(None, flags={"models": models, "groups.exclude": [["a", "bee"]], "groups.accompany": [["a", "b"]]}, environ={})


def test_only_another_reason_is_news() -> None:
    stays = Wait(STAY, "b stays for 42 s", ("b",))
    assert stays.is_as(replace(stays, message="b stays for 41 s"))
    assert not stays.is_as(replace(stays, models=("d",)))
    assert not stays.is_as(replace(stays, reason=LEAVE))
    assert not stays.is_as(None)


# The supervisor's part.


def two(tmp_path: Path, **keys: Any) -> dict[str, Any]:
    return {name: {"model": str(tmp_path), "memory_gib": 10} | keys for name in ("a", "b")}


async def fill(made: Scene, by: str) -> None:
    """The node, which has room for one, with `a`."""
    made.cluster.offered = {"n": 15}
    made.supervisor.want("a", Want.RUNNING, by)
    await made.tick()
    await make_ready(made, "a")


def waits_of(made: Scene, name: str) -> str:
    return made.supervisor.snapshot().models[name].wait.reason


async def make_ready(made: Scene, name: str) -> None:
    made.cluster.names = ["a", "b", "m"]
    made.cluster.serve(name)
    await made.tick(3)
    assert made.state(name) == "READY"


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (there("a", state=ModelState.LOADING), LOADS),
        (there("a", state=ModelState.STOPPED, busy="place"), LOADS),
        (there("a", state=ModelState.STOPPING, state_since_s=NOW_S - 1), ENDS),
        (there("a", state=ModelState.STOPPED, busy="destroy"), ENDS),
        (there("a", state=ModelState.STOPPING, state_since_s=NOW_S - 60), None),
        (there("a"), None),
    ],
    ids=["loads", "is placed", "ends", "is removed", "does not die", "serves"],
)
def test_the_first_waits_for_what_is_started_or_ended_before_it(other: Record, kind: str | None) -> None:
    found = decided(waits("c", gib=None), waits("d", gib=None, requested_since_s=950), other)
    assert (found.next_to_start, found.queue) == ("c", ("c", "d"))
    assert (reason(found, "c") if "c" in found.waits else None) == (None if kind is None else (kind, ("a",), None))
    assert reason(found, "d") == (STARTED_FIRST, ("c",), None)


async def test_a_model_that_failed_says_so_while_it_waits(tmp_path: Path) -> None:
    async with stage(tmp_path, models=two(tmp_path)) as made:
        made.cluster.offered = {"n": 100}
        made.supervisor.want("a", Want.RUNNING, "config")
        await made.tick(2)
        made.cluster.show(alive=False, exit_code=1)
        await made.tick()
        made.cluster.show()
        made.supervisor.want("b", Want.RUNNING, "config")
        await made.tick(2)
        made.clock.now_s += 30
        await made.tick()

        view = made.supervisor.snapshot().models["a"]
        wait = view.wait
        assert (view.state.value, view.reason, wait and wait.reason) == ("FAILED", "EngineExited", LOADS)
        assert wait and lacking(view.message, "exit code 1", wait.message) == []


async def test_the_first_says_what_it_waits_for_from_the_first_moment(tmp_path: Path) -> None:
    async with stage(tmp_path, models=two(tmp_path)) as made:
        made.cluster.offered = {"n": 100}

        def shown(name: str) -> tuple[str, int | None, str | None]:
            view = made.supervisor.snapshot().models[name]
            wait = view.wait
            assert view.message == (None if wait is None else wait.message)
            return view.state.value, view.turn, None if wait is None else wait.reason

        made.cluster.connected = False
        made.supervisor.want("a", Want.RUNNING, "config")
        made.supervisor.want("b", Want.RUNNING, "config")
        await made.tick()
        assert shown("a") == ("STOPPED", 1, AGENT_SILENT)
        assert shown("b") == ("STOPPED", 2, STARTED_FIRST)
        made.cluster.connected = True
        await made.tick()
        assert shown("a") == ("LOADING", None, None)
        # Now it is the first of those that wait.
        await made.tick()
        assert shown("b") == ("STOPPED", 1, LOADS)
        await make_ready(made, "a")
        await made.tick(2)
        assert shown("b")[1:] == (None, None) and made.state("b") != "STOPPED"


SHORT = replace(READING, level="tight")


@pytest.mark.parametrize(
    ("connected", "trouble", "reading", "reason"),
    [
        (True, None, READING, None),
        (False, None, READING, AGENT_SILENT),
        (False, "RayStarting", READING, RAY_STARTS),
        (False, "RayUnavailable", SHORT, "RayUnavailable"),
        (True, "GpuSilent", SHORT, "MemoryShort"),
    ],
)
def test_what_keeps_every_load_from_beginning(
    connected: bool, trouble: str | None, reading: Reading, reason: str | None, tmp_path: Path
) -> None:
    made = scene(tmp_path)
    node = NodeView("n", "n", True, True, reading, 100.0, 0.0)
    observation = Observation((), reading, connected, nodes=(node,), trouble=Condition(trouble, "It is so.") if trouble else None)
    gate = made.supervisor._gate
    gate.look(observation, {})
    block = gate.block_reason(observation)
    assert (None if block is None else block.reason) == reason
    made.store.close()


async def enter(made: Scene, name: str, order: list[str] | None = None) -> str:
    async with made.supervisor.lease(name) as lease:
        if order is not None:
            order.append(name)
        return lease.model


async def test_who_asks_for_the_one_that_goes_waits_behind_the_other(tmp_path: Path) -> None:
    async with stage(tmp_path, models=two(tmp_path), min_residency_s=0) as made:
        await fill(made, "config")
        order: list[str] = []
        async with made.supervisor.lease("a"):
            first = asyncio.create_task(enter(made, "b", order))
            await made.tick(4)
            assert made.state("a") == "DRAINING"
            again = asyncio.create_task(enter(made, "a", order))
            await made.tick(2)
            assert (made.state("a"), made.state("b")) == ("DRAINING", "STOPPED")
        await made.tick(4)
        assert made.state("b") == "READY"
        await first
        await made.tick(8)
        assert (made.state("a"), made.state("b")) == ("READY", "STOPPED")
        await again
        assert order == ["b", "a"]
        told = [(event.model, event.data["to"]) for event in made.supervisor.journal.events(0, 200) if event.kind == "swap"]
        assert told == [("a", "b"), ("b", "a")]


async def test_the_one_that_was_to_go_stays_if_nobody_waits_any_more(tmp_path: Path) -> None:
    async with stage(tmp_path, models=two(tmp_path), min_residency_s=0) as made:
        await fill(made, "config")
        async with made.supervisor.lease("a"):
            first = asyncio.create_task(enter(made, "b"))
            await made.tick(4)
            again = asyncio.create_task(enter(made, "a"))
            await made.tick()
            first.cancel()
            await made.tick(3)
            assert made.state("a") == "READY"
            assert await again == "a"


async def change(made: Scene, to: str, load_s: int = 40) -> list[str]:
    """A client asks for the model, which loads for so long and is used for a moment. Its state after 6 s, and once it has answered."""
    made.cluster.names = None
    waiting = asyncio.create_task(enter(made, to))
    await made.tick(6)
    early = made.state(to)
    if early == "LOADING":
        await made.tick(load_s)
        await make_ready(made, to)
        await waiting
        await made.tick(10)
    else:
        await left(waiting)
    return [early, made.state(to)]


async def test_the_first_change_is_made_at_once_and_then_two_models_wait_for_each_other(tmp_path: Path) -> None:
    """Each is used for 10 s, far less than its load takes."""
    async with stage(tmp_path, models=two(tmp_path), min_residency_s=60, backoff__initial_s=300) as made:
        made.cluster.offered = {"n": 15}
        made.supervisor.want("a", Want.RUNNING, "config")
        await made.tick(40)
        await make_ready(made, "a")
        await made.tick(10)
        assert await change(made, "b") == ["LOADING", "READY"], "a was idle"
        assert await change(made, "a") == ["STOPPED", "STOPPED"], "b has not stayed as long as its load took"
        await made.tick(40)
        assert await change(made, "a") == ["LOADING", "READY"]


async def test_models_that_run_beside_each_other_take_no_turns(tmp_path: Path) -> None:
    async with stage(tmp_path, models=two(tmp_path)) as made:
        for name in ("a", "b"):
            made.supervisor.want(name, Want.RUNNING, "config")
            await made.tick(40)
            await make_ready(made, name)
        await made.tick(1)
        assert not any(record.takes_turns for record in made.supervisor.registry.records.values())


@pytest.mark.parametrize("when", ["it drains", "it ends", "b is placed", "b loads"])
async def test_a_client_that_leaves_does_not_empty_the_machine(when: str, tmp_path: Path) -> None:
    async with stage(tmp_path, models=two(tmp_path), swap_idle_s=0, min_residency_s=0) as made:
        await fill(made, "config")
        made.cluster.names = None
        lease = made.supervisor.lease("a")
        if when == "it drains":
            await lease.__aenter__()
        waiting = asyncio.create_task(enter(made, "b"))
        if when == "it ends":
            # Its client leaves while the stop is under way.
            while "destroy a" not in made.cluster.log:
                await made.tick()
        elif when == "b is placed":
            made.cluster.placing.clear()
            while made.supervisor.registry.find("b").attempt.lack is None:
                made.cluster.placing.set()
                await made.tick()
            made.cluster.placing.clear()
            while made.state("b") != "PLANNED":
                await made.tick()
        else:
            await made.tick(6)
        assert (made.state("a"), made.state("b")) == {
            "it drains": ("DRAINING", "STOPPED"),
            "it ends": ("STOPPING", "STOPPED"),
            "b is placed": ("STOPPED", "PLANNED"),
            "b loads": ("STOPPED", "LOADING"),
        }[when]
        await left(waiting)
        made.cluster.placing.set()
        if when == "it drains":
            await made.tick(3)
            await lease.__aexit__()
            await made.tick(3)
            assert (made.state("a"), made.state("b")) == ("READY", "STOPPED")
            assert made.supervisor.snapshot().models["a"].wanted_by == "config"
            return
        await made.tick(6)
        await make_ready(made, "b")
        assert (made.state("a"), made.state("b")) == ("STOPPED", "READY")


@pytest.mark.parametrize("why", ["its load fails", "it is unloaded by hand"])
async def test_a_load_that_evicted_somebody_and_ends_brings_it_back(why: str, tmp_path: Path) -> None:
    async with stage(tmp_path, models=two(tmp_path), swap_idle_s=0, min_residency_s=0) as made:
        await fill(made, "config")
        made.cluster.names = None
        waiting = asyncio.create_task(enter(made, "b"))
        await made.tick(6)
        assert (made.state("a"), made.state("b")) == ("STOPPED", "LOADING")
        if why == "its load fails":
            made.cluster.show(alive=False, processes=0, exit_code=1)
        else:
            made.supervisor.want("b", Want.STOPPED, "admin")
        await made.tick(4)
        assert (made.state("a"), made.supervisor.snapshot().models["a"].wanted_by) == ("LOADING", "config")
        with pytest.raises(Unavailable):
            await waiting


async def test_one_that_an_operator_wants_keeps_the_place_that_was_made_for_it(tmp_path: Path) -> None:
    async with stage(tmp_path, models=two(tmp_path), swap_idle_s=0, min_residency_s=0) as made:
        await fill(made, "config")
        made.cluster.names = None
        made.supervisor.want("b", Want.RUNNING, "admin")
        await made.tick(6)
        made.cluster.show(alive=False, processes=0, exit_code=1)
        await made.tick(4)
        assert (made.state("a"), made.state("b")) == ("STOPPED", "FAILED")


async def test_nobody_goes_for_a_client_that_was_told_to_come_back_and_has_not(tmp_path: Path) -> None:
    async with stage(tmp_path, models=two(tmp_path)) as made:
        await fill(made, "config")
        async with made.supervisor.lease("a"):
            made.limit_wait("b", 0.0)
            with pytest.raises(ModelLoading):
                async with made.supervisor.lease("b"):
                    raise AssertionError
            await made.tick(3)
            assert made.supervisor.registry.find("b").has_claim
            await made.tick(seconds=PROMISE_S)
        await made.tick(4, seconds=60)
        assert (made.state("a"), made.state("b")) == ("READY", "STOPPED")


@pytest.mark.parametrize("comes", [True, False], ids=["it comes back", "it does not"])
async def test_a_model_stays_for_a_client_that_was_told_to_come_back(tmp_path: Path, comes: bool) -> None:
    """It loads for 300 s, the client is told to come back 10 s before it is READY, and another model is asked for once it is."""
    async with stage(tmp_path, models=two(tmp_path), min_residency_s=0) as made:
        made.cluster.offered = {"n": 15}
        made.supervisor.want("a", Want.RUNNING, "request")
        await made.tick(29, seconds=10)
        made.limit_wait("a", 0.0)
        with pytest.raises(ModelLoading):
            async with made.supervisor.lease("a"):
                raise AssertionError
        made.limit_wait("a", 300.0)
        await made.tick(seconds=10)
        await make_ready(made, "a")
        made.cluster.names = None
        other = asyncio.create_task(enter(made, "b"))
        await made.tick(9, seconds=5)
        assert (made.state("a"), made.state("b")) == ("READY", "STOPPED")
        if comes:
            assert await enter(made, "a") == "a"
            await made.tick(seconds=made.config.swap_idle_s)
        else:
            await made.tick(seconds=PROMISE_S - 50)
        await made.tick(4)
        assert made.state("a") == "STOPPED"
        await left(other)


async def test_waiters_of_one_model_are_served_in_their_order(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        order: list[str] = []

        async def ask(number: int) -> None:
            async with made.supervisor.lease("m"):
                order.append(str(number))

        async with asyncio.TaskGroup() as tasks:
            for number in range(100):
                tasks.create_task(ask(number))
            await made.tick()
            await make_ready(made, "m")
        assert order == [str(number) for number in range(100)]
        assert made.cluster.log.count("spawn m") == 1


async def test_companions_come_and_go_together(tmp_path: Path) -> None:
    models = two(tmp_path, ttl=50)
    async with stage(tmp_path, models=models, groups__accompany=[["a", "b"]]) as made:
        waiting = asyncio.create_task(enter(made, "a"))
        await made.tick()
        await make_ready(made, "a")
        await waiting
        await made.tick()
        await make_ready(made, "b")
        assert made.supervisor.snapshot().models["b"].wanted_by == "group"
        await made.tick(seconds=40)
        await enter(made, "b")
        await made.tick(3, seconds=8)
        assert (made.state("a"), made.state("b")) == ("READY", "READY")
        await made.tick(seconds=50)
        await made.tick(4)
        assert (made.state("a"), made.state("b")) == ("STOPPED", "STOPPED")


@pytest.mark.parametrize(("used", "by", "want"), [(True, "ttl", Want.RUNNING), (True, "admin", Want.STOPPED), (False, "ttl", Want.STOPPED)])
async def test_a_companion_in_use_outlives_the_one_that_brought_it(tmp_path: Path, used: bool, by: str, want: Want) -> None:
    async with stage(tmp_path, models=two(tmp_path), groups__accompany=[["a", "b"]]) as made, AsyncExitStack() as requests:
        made.supervisor.want("a", Want.RUNNING, "admin")
        for name in ("a", "b"):
            await made.tick()
            await make_ready(made, name)
        if used:
            await requests.enter_async_context(made.supervisor.lease("b"))
        made.supervisor.want("a", Want.STOPPED, by)
        assert made.supervisor.registry.find("b").desired.want is want


async def test_nobody_makes_room_for_a_load_whose_operator_was_told_that_it_failed(tmp_path: Path) -> None:
    async with stage(tmp_path, models=two(tmp_path), min_residency_s=0) as made:
        made.cluster.offered = {"n": 15}
        made.cluster.place_error = LoadRefused("Nothing of it can be quantized.")
        operation = made.supervisor.want("b", Want.RUNNING, "admin")
        await made.tick(2)
        assert made.operator.operation(operation.id).state is OperationState.FAILED
        made.cluster.place_error = None
        made.supervisor.want("a", Want.RUNNING, "config")
        await made.tick()
        await make_ready(made, "a")
        made.supervisor.reconfigure(made.config)
        await made.tick(6)
        view = made.supervisor.snapshot().models["b"]
        assert (made.state("a"), view.state, view.want, view.wanted_by) == ("READY", "STOPPED", "RUNNING", "retry")
        assert waits_of(made, "b") == UNCLAIMED
        # It is what the next daemon goes by, too.
        assert made.store.wishes.desired()["b"].by == "retry"
        made.supervisor.want("b", Want.RUNNING, "admin")
        await made.tick(4)
        assert (made.state("a"), made.state("b")) == ("STOPPED", "LOADING")


async def test_a_load_by_hand_is_asked_for_also_where_the_configuration_wished_it_before(tmp_path: Path) -> None:
    async with stage(tmp_path, models=two(tmp_path), min_residency_s=0) as made:
        await fill(made, "config")
        made.supervisor.want("b", Want.RUNNING, "config")
        await made.tick(3)
        assert (made.state("a"), made.state("b")) == ("READY", "STOPPED")
        made.supervisor.want("b", Want.RUNNING, "admin")
        await made.tick(4)
        assert (made.state("a"), made.state("b")) == ("STOPPED", "LOADING")


def line(made: Scene) -> list[tuple[str, int | None]]:
    return [(name, view.turn) for name, view in sorted(made.supervisor.snapshot().models.items())]


@pytest.mark.parametrize("by", ["config", "admin"])
async def test_a_wish_of_its_own_keeps_its_place_while_its_clients_are_sent_away(tmp_path: Path, by: str) -> None:
    async with stage(tmp_path, models=two(tmp_path)) as made:
        made.cluster.reading = replace(READING, level="pressed")
        made.supervisor.want("a", Want.RUNNING, by)
        await made.tick()
        made.supervisor.want("b", Want.RUNNING, by)
        await made.tick()
        assert line(made) == [("a", 1), ("b", 2)]
        waiting = asyncio.create_task(enter(made, "a"))
        await made.tick()
        made.cluster.reading = replace(READING, level="critical")
        await made.tick(2)
        with pytest.raises(Unavailable):
            await waiting
        await made.tick()
        assert line(made) == [("a", 1), ("b", 2)]


async def test_what_is_refused_before_it_had_its_turn_comes_back_to_its_place(tmp_path: Path) -> None:
    async with stage(tmp_path, models={**two(tmp_path), "p": {"model": str(tmp_path), "memory_gib": 10, "pin": True}}) as made:
        made.cluster.offered = {"n": 15}
        made.supervisor.want("p", Want.RUNNING, "config")
        await made.tick()
        made.cluster.names = ["p"]
        made.cluster.serve("p")
        await made.tick(3)
        made.supervisor.want("a", Want.RUNNING, "config")
        await made.tick()
        made.supervisor.want("b", Want.RUNNING, "config")
        await made.tick(3)
        assert line(made)[:2] == [("a", 1), ("b", 2)]
        waiting = asyncio.create_task(enter(made, "a"))
        await made.tick(3)
        with pytest.raises(ModelFailed):
            await waiting
        assert (made.state("a"), line(made)[:2]) == ("FAILED", [("a", None), ("b", 1)])
        await made.tick(seconds=600)
        assert line(made)[:2] == [("a", 1), ("b", 2)]


async def test_what_is_loaded_at_start_is_not_taken_back_with_a_request_of_before(tmp_path: Path) -> None:
    models = {"m": {"model": str(tmp_path), "preload": True}}
    async with stage(tmp_path, models=models) as first:
        first.supervisor.want("m", Want.STOPPED, "ttl")
        first.supervisor.want("m", Want.RUNNING, "request")
    async with stage(tmp_path, models=models) as second:
        second.cluster.reading = replace(READING, level="pressed")
        await second.tick()
        waiting = asyncio.create_task(enter(second, "m"))
        await second.tick()
        second.cluster.reading = replace(READING, level="critical")
        await second.tick(2)
        with pytest.raises(Unavailable):
            await waiting
        view = second.supervisor.snapshot().models["m"]
        assert (view.want, view.wanted_by) == (Want.RUNNING, "config")
