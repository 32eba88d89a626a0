"""What the control plane does at each level of the guard: who is shed, who is unloaded, what does not begin."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from sparkd.control.evictions import IDLE_S
from sparkd.control.load_gate import CORDON_AFTER_S, EVICT_EVERY_S
from sparkd.errors import Unavailable
from sparkd.state.nouns import Progress, Want
from tests.support.facts import lacking
from tests.support.fakes import READING, FakeCluster, Scene, stage


async def ready(made: Scene, *models: str) -> None:
    for name in models:
        made.cluster.names = [name]
        made.supervisor.want(name, Want.RUNNING, "admin")
        await made.tick(2)
        made.cluster.serve(name)
        await made.tick(3)
        assert made.state(name) == "READY"


async def asked(made: Scene, name: str) -> None:
    async with made.supervisor.lease(name):
        pass


def level(made: Scene, name: str) -> None:
    made.cluster.reading = replace(READING, level=name)


def evicted(made: Scene) -> list[str | None]:
    return [event.model for event in made.supervisor.journal.events(0, 200) if event.kind == "evict"]


def models(folder: Path, **keys: dict[str, object]) -> dict[str, object]:
    (folder / "model").mkdir()
    return {name: {"model": str(folder / "model"), **more} for name, more in keys.items()}


async def test_the_idle_model_of_the_lowest_priority_goes_and_one_a_minute(tmp_path: Path) -> None:
    given = models(tmp_path, low={"priority": 10}, high={"priority": 60}, pinned={"priority": 1, "pin": True}, busy={"priority": 1})
    async with stage(tmp_path, models=given) as made:
        await ready(made, "low", "high", "pinned", "busy")
        async with made.supervisor.lease("busy"):
            level(made, "tight")
            await made.tick(2, seconds=IDLE_S)
            assert evicted(made) == [], "to be low is no reason yet"
            level(made, "pressed")
            await made.tick(10)
            assert (evicted(made), made.state("low"), made.state("high")) == (["low"], "STOPPED", "READY")
            await made.tick(2, seconds=EVICT_EVERY_S)
            assert evicted(made) == ["low", "high"]
            await made.tick(2, seconds=EVICT_EVERY_S)
            assert evicted(made) == ["low", "high"], "pinned, and busy"


async def test_a_model_whose_second_node_is_short_goes_too(tmp_path: Path) -> None:
    cluster = FakeCluster()
    cluster.nodes = ("o", "n")
    async with stage(tmp_path, cluster=cluster) as made:
        await ready(made, "m")
        level(made, "pressed")
        await made.tick(2, seconds=IDLE_S)
        assert evicted(made) == ["m"]


async def test_who_waits_for_a_load_that_may_not_begin_is_told_who_holds_the_memory(tmp_path: Path) -> None:
    async with stage(tmp_path, models=models(tmp_path, there={}, absent={})) as made:
        await ready(made, "there")
        level(made, "tight")
        await made.tick()

        async def ask() -> None:
            async with made.supervisor.lease("absent"):
                raise AssertionError("there is no memory for it")

        asking = asyncio.ensure_future(ask())
        await made.tick(2)
        with pytest.raises(Unavailable) as caught:
            await asking
        assert lacking(caught.value.message, "absent", "n is tight", "0.0 GiB", "there (4 GiB)") == []
        assert ([row["model"] for row in caught.value.held_by], caught.value.headers()) == (["there"], {"retry-after": "30"})
        assert (made.state("absent"), made.cluster.log.count("place absent")) == ("STOPPED", 0)
        assert [(one.reason, one.node) for one in made.supervisor.snapshot().conditions] == [("MemoryShort", None)]


async def test_a_node_that_stays_short_is_shut_and_loads_begin_on_the_other(tmp_path: Path) -> None:
    async with stage(tmp_path, models=models(tmp_path, there={}, absent={})) as made:
        well = {node: replace(READING, node_id=node) for node in ("n", "o")}
        made.cluster.agents, made.cluster.node_readings = ("n", "o"), well | {"o": replace(well["o"], level="tight")}
        made.supervisor.want("absent", Want.RUNNING, "admin")
        await made.tick(2, seconds=CORDON_AFTER_S / 2 - 1)
        assert (made.state("absent"), made.cluster.cordoned) == ("STOPPED", frozenset()), "it may be what has just ended"
        await made.tick(2, seconds=CORDON_AFTER_S / 2)
        assert (made.state("absent"), made.cluster.cordoned) == ("LOADING", {"o"})
        assert [(one.reason, one.node) for one in made.supervisor.snapshot().conditions] == [("MemoryShort", "o")]

        made.cluster.node_readings = {node: replace(one, level="tight") for node, one in well.items()}
        made.supervisor.want("there", Want.RUNNING, "admin")
        made.cluster.names = ["absent"]
        made.cluster.serve("absent")
        await made.tick(3, seconds=CORDON_AFTER_S)
        assert (made.state("there"), made.cluster.cordoned) == ("STOPPED", {"n", "o"}), "no node is left"

        made.cluster.node_readings, made.cluster.names = well, None
        await made.tick(2)
        assert (made.state("there"), made.cluster.cordoned) == ("LOADING", frozenset())
        told = [(event.model, event.message) for event in made.supervisor.journal.events(0, 200) if event.kind == "memory"]
        assert sorted(told[-2:]) == [(None, "n has memory again."), (None, "o has memory again.")]


async def test_what_fits_on_the_shut_node_alone_is_told_so_and_begins_once_that_is_open(tmp_path: Path) -> None:
    async with stage(tmp_path, models=models(tmp_path, large={"memory_gib": 60})) as made:
        well = {node: replace(READING, node_id=node) for node in ("n", "o")}
        made.cluster.agents, made.cluster.node_readings = ("n", "o"), well | {"o": replace(well["o"], level="tight")}
        made.cluster.offered = {"n": 40.0, "o": 100.0}
        await made.tick(2, seconds=CORDON_AFTER_S)
        made.supervisor.want("large", Want.RUNNING, "admin")
        await made.tick(3)
        view = made.supervisor.snapshot().models["large"]
        assert (view.state, view.reason) == ("FAILED", "DoesNotFit")
        assert view.message is not None
        assert lacking(view.message, "(n 40 of 40 GiB)", "on o", "(memory_gib, kv_cache)") == []
        made.cluster.node_readings = well
        await made.tick(3)
        assert made.state("large") == "LOADING", "it need not wait for its back-off"


async def test_a_short_node_that_misses_a_look_is_short_as_before(tmp_path: Path) -> None:
    async with stage(tmp_path, models=models(tmp_path, small={})) as made:
        short = {"n": replace(READING, node_id="n"), "o": replace(READING, node_id="o", level="tight")}
        made.cluster.agents, made.cluster.node_readings = ("n", "o"), short
        await made.tick(2, seconds=CORDON_AFTER_S / 2)
        made.cluster.agents, made.cluster.unseen = ("n",), frozenset({"o"})
        await made.tick()
        made.cluster.agents, made.cluster.unseen = ("n", "o"), frozenset()
        made.supervisor.want("small", Want.RUNNING, "admin")
        await made.tick(2, seconds=CORDON_AFTER_S / 4)
        assert (made.state("small"), made.cluster.cordoned) == ("LOADING", {"o"})
        told = [event.message for event in made.supervisor.journal.events(0, 200) if event.kind == "memory"]
        assert told == ["o is tight, 0.0 GiB available."], "it had no memory again"


async def test_who_waits_for_an_open_node_that_misses_a_look_waits_on(tmp_path: Path) -> None:
    async with stage(tmp_path, models=models(tmp_path, absent={})) as made:
        short = {"n": replace(READING, node_id="n", level="tight"), "o": replace(READING, node_id="o")}
        made.cluster.agents, made.cluster.node_readings = ("n", "o"), short
        await made.tick(2, seconds=CORDON_AFTER_S)
        assert made.cluster.cordoned == {"n"}
        made.cluster.agents, made.cluster.unseen, made.cluster.node_readings = ("n",), frozenset({"o"}), {"n": short["n"]}

        async def ask() -> None:
            async with made.supervisor.lease("absent"):
                pass

        asking = asyncio.ensure_future(ask())
        await made.tick(2)
        assert not asking.done() and made.state("absent") == "STOPPED"
        made.cluster.agents, made.cluster.unseen, made.cluster.node_readings = ("n", "o"), frozenset(), short
        await made.tick(2)
        assert made.state("absent") == "LOADING"
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_a_look_in_which_nobody_could_look_sends_nobody_away_and_opens_nothing(tmp_path: Path) -> None:
    async with stage(tmp_path, models=models(tmp_path, absent={}, slow={})) as made:
        made.cluster.agents = ("n", "o")
        made.cluster.node_readings = {"n": replace(READING, node_id="n", level="tight"), "o": replace(READING, node_id="o")}
        await made.tick(2, seconds=CORDON_AFTER_S)
        made.supervisor.want("slow", Want.RUNNING, "admin")
        await made.tick(2)
        asking = asyncio.ensure_future(asked(made, "absent"))
        await made.tick(2)
        ranks, made.cluster.ranks, made.cluster.agents = made.cluster.ranks, None, ()
        made.cluster.reading, made.cluster.connected = None, False
        await made.tick(1)
        made.cluster.ranks, made.cluster.agents, made.cluster.reading, made.cluster.connected = ranks, ("n", "o"), READING, True
        await made.tick(1)
        assert (asking.done(), made.cluster.cordoned) == (False, {"n"})
        told = [event.message for event in made.supervisor.journal.events(0, 200) if event.kind == "memory"]
        assert told == ["n is tight, 0.0 GiB available."], "it had no memory again"
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.parametrize("part", ["load_gate.LoadGate._note_shortage", "memory_release.MemoryRelease.look"])
async def test_a_look_that_raises_closes_every_node_until_one_succeeds(tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError

    async with stage(tmp_path, models=models(tmp_path, absent={})) as made:
        made.cluster.agents = ("n", "o")
        await made.tick(2)
        with monkeypatch.context() as fault:
            fault.setattr(f"sparkd.control.{part}", broken)
            made.supervisor.want("absent", Want.RUNNING, "admin")
            await made.tick(3)
            assert made.state("absent") == "STOPPED"
            assert made.cluster.cordoned == {"n", "o"}, "to a placement in progress too"
        await made.tick(2)
        assert (made.state("absent"), made.cluster.cordoned) == ("LOADING", frozenset())


async def test_who_waits_for_an_engine_that_a_new_daemon_sees_in_part_does_not_end_it(tmp_path: Path) -> None:
    """Its memory is what makes the node short, and its other rank is out of sight until Ray is there."""
    cluster, given = FakeCluster(), models(tmp_path, m={})
    cluster.nodes, cluster.agents, cluster.names = ("n", "o"), ("n", "o"), ["m"]
    async with stage(tmp_path, cluster=cluster, models=given) as made:
        asking = asyncio.ensure_future(asked(made, "m"))
        await made.tick(2)
        cluster.show_rank(0, progress=Progress(phase="serving", server_up=True))
        await made.tick(3)
        await asking
    cluster.agents, cluster.unseen = ("n",), frozenset({"o"})
    cluster.node_readings = {"n": replace(READING, node_id="n", level="tight")}
    cluster.log.clear()
    async with stage(tmp_path, cluster=cluster, models=given) as made:
        asking = asyncio.ensure_future(asked(made, "m"))
        await made.tick(3)
        assert (asking.done(), made.supervisor.registry.find("m").desired.want) == (False, Want.RUNNING)
        cluster.agents, cluster.unseen = ("n", "o"), frozenset()
        await made.tick(4)
        await asking
        assert (made.state("m"), "destroy m" in cluster.log) == ("READY", False)
