"""The release gate: what it waits for, what may begin meanwhile, and what it says of memory that stays away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sparkd import metrics
from sparkd.cluster.node_tracker import Observation
from sparkd.control.journal import Journal
from sparkd.control.memory_release import LIMIT_S, MemoryRelease
from sparkd.state.nouns import RankFact, Reading, Want
from sparkd.state.snapshot import NodeView
from sparkd.state.store import Store
from tests.sparkd.control.test_decision import ALIVE
from tests.sparkd.control.test_supervisor import make_ready, stage
from tests.support.facts import lacking
from tests.support.fakes import FakeClock, Scene

GIB = 1 << 30
READING = Reading("n", 0.0, 121 * GIB, 110 * GIB, 50 * GIB, 0, 0, 0)
SERVING = replace(ALIVE, host_bytes=6 * GIB, device_bytes=52 * GIB)


# Another node, and what serves there.
THERE = replace(READING, node_id="o", mem_available_bytes=50 * GIB)
FAR = replace(SERVING, handle=replace(SERVING.handle, node_id="o"))


def rank(model: str, gib: float | None) -> RankFact:
    """Another engine on the node, which holds so much."""
    held = None if gib is None else int(gib * GIB)
    return replace(ALIVE, handle=replace(ALIVE.handle, model=model, rank_id=f"{model}-1"), host_bytes=held, device_bytes=0)


def seen(*readings: Reading) -> tuple[NodeView, ...]:
    return tuple(NodeView(one.node_id, one.node_id, one is READING, True, one, 100.0, 0.0) for one in readings)


class Gate:
    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.store = Store(folder / "state.db")
        self.journal = Journal(self.store, self.clock)
        self.release = MemoryRelease(self.journal, self.clock)
        self.reading = READING

    def look(self, available_gib: float, *ranks: RankFact, seconds: float = 1.0, **changes: object) -> bool:
        self.clock.now_s += seconds
        seen = replace(self.reading, mem_available_bytes=int(available_gib * GIB))
        self.release.look(Observation(ranks, seen, True, **changes))  # type: ignore[arg-type]
        return not self.release.room_gib and not self.release.leaked_gib

    @property
    def reasons(self) -> list[tuple[str, str | None]]:
        return [(one.reason, one.node) for one in self.release.conditions]

    @property
    def told(self) -> list[str]:
        return [event.message for event in self.journal.events(0, 100) if event.kind == "release"]


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path)
    yield made
    made.store.close()


def test_a_load_waits_until_memory_is_back(gate: Gate) -> None:
    assert gate.look(50, SERVING)
    assert gate.release.missing_bytes == {}
    assert not gate.look(51)
    assert gate.release.missing_bytes == {"n": 57 * GIB}
    assert not gate.look(80)
    assert gate.release.missing_bytes == {"n": 28 * GIB}
    assert gate.reasons == [("MemoryReturns", "n")]
    assert gate.look(107)
    assert gate.release.missing_bytes == {}
    assert [lacking(line, "57.0 of 58.0 GiB", "n", "2.0 s") for line in gate.told] == [[]]
    assert gate.reasons == []


def test_a_load_may_begin_that_needs_no_more_than_is_free(gate: Gate) -> None:
    gate.look(50, SERVING)
    gate.look(60)
    assert gate.release.room_gib == {"n": 54.0}, "60 less the guard's soft limit, 6"


def test_several_engines_that_end_one_after_the_other(gate: Gate) -> None:
    large, small = SERVING, rank("k", 20)
    gate.look(30, large, small)
    gate.look(30, small)
    assert gate.release.missing_bytes == {"n": 58 * GIB}
    gate.look(50)
    assert gate.release.missing_bytes == {"n": 58 * GIB}, "20 of 78 GiB are back"
    gate.look(60)
    assert [(one.reason, lacking(one.message, "48.0 of 58.0 GiB of m", "n")) for one in gate.release.conditions] == [("MemoryReturns", [])]
    assert gate.look(107)
    assert gate.release.missing_bytes == {}


@pytest.mark.parametrize("apart_s", [LIMIT_S + 5, 60.0], ids=["after it was told", "while it was waited for"])
def test_a_leak_stays_known_when_another_engine_ends(gate: Gate, apart_s: float) -> None:
    small, large = rank("a", 30), rank("b", 60)
    gate.look(20, small, large)
    gate.look(35, large)
    gate.look(35, large, seconds=apart_s)
    gate.look(35, large)
    gate.look(35)
    assert gate.release.missing_bytes == {"n": 75 * GIB}
    gate.look(95, seconds=5)
    assert gate.release.missing_bytes == {"n": 15 * GIB}, "the larger one's are back"
    for _ in range(3):
        gate.look(95, seconds=LIMIT_S)
        assert (gate.release.room_gib, gate.release.leaked_gib) == ({}, {"n": 15.0}), "it counts as held"
    assert [lacking(str(one), "MemoryNotReleased", "15.0 of 30.0 GiB of a") for one in gate.release.conditions] == [[]]
    assert metrics.RELEASE_LEAKED_BYTES.labels("n")._value.get() == 15 * GIB
    assert gate.look(110), "late, and back all the same"
    assert metrics.RELEASE_LEAKED_BYTES.labels("n")._value.get() == 0


def test_a_second_leak_is_told_beside_the_first(gate: Gate) -> None:
    gate.look(20, rank("a", 30), rank("b", 60))
    gate.look(35, rank("b", 60))
    gate.look(35, rank("b", 60), seconds=LIMIT_S)
    gate.look(75)
    gate.look(75, seconds=LIMIT_S)
    assert [line.split(" have")[0] for line in gate.told] == ["15.0 of 30.0 GiB of a", "20.0 of 60.0 GiB of b"]
    assert gate.release.missing_bytes == {"n": 35 * GIB}
    assert metrics.RELEASE_LEAKED_BYTES.labels("n")._value.get() == 35 * GIB


def test_an_end_while_the_memory_of_an_earlier_one_returns(gate: Gate) -> None:
    gate.look(20, rank("a", 30), rank("b", 60))
    gate.look(20, rank("b", 60))
    gate.look(20, rank("b", 60), seconds=10)
    gate.look(45, rank("b", 60))
    gate.look(45)
    assert gate.release.missing_bytes == {"n": 65 * GIB}
    gate.look(105)
    assert gate.release.missing_bytes == {"n": 5 * GIB}
    assert gate.look(110)
    assert gate.release.missing_bytes == {}


def test_a_dead_rank_whose_processes_live_still_holds(gate: Gate) -> None:
    gate.look(50, SERVING)
    assert gate.look(50, replace(SERVING, alive=False, processes=2))
    assert not gate.look(50, replace(SERVING, alive=False, processes=0))


@pytest.mark.parametrize(("left_gib", "is_little"), [(33.0, False), (8.0, True)])
def test_after_a_limit_it_says_what_is_missing_unless_that_is_little(gate: Gate, left_gib: float, is_little: bool) -> None:
    gate.look(50, SERVING)
    gate.look(108 - left_gib)
    assert not gate.look(108 - left_gib, seconds=LIMIT_S - 2)
    assert gate.look(108 - left_gib, seconds=2) is is_little
    assert gate.look(108 - left_gib) is is_little
    told = ("50.0 of 58.0 GiB", "90.0 s") if is_little else ("33.0 of 58.0 GiB", "90 s", "`sparkd doctor`", "restart n")
    assert [lacking(line, *told) for line in gate.told] == [[]]
    if not is_little:
        assert metrics.RELEASE_LEAKED_BYTES.labels("n")._value.get() == left_gib * GIB
        assert gate.reasons == [("MemoryNotReleased", "n")] and "33.0 of 58.0 GiB" in str(gate.release.conditions)
        assert gate.look(108), "late, and back all the same"


@pytest.mark.parametrize(
    "rank",
    [replace(ALIVE, host_bytes=GIB // 2), ALIVE],
    ids=["too small to tell", "nobody could weigh it"],
)
def test_what_cannot_be_told_is_not_waited_for(gate: Gate, rank: RankFact) -> None:
    gate.look(50, rank)
    assert gate.look(50)


def test_a_node_out_of_sight_is_unknown_not_gone(gate: Gate) -> None:
    gate.look(50, SERVING)
    assert gate.look(50, unseen=frozenset({"n"}))
    assert not gate.look(50)


def test_a_node_that_goes_before_its_memory_is_back_holds_up_no_other(gate: Gate) -> None:
    here, there = READING, THERE
    gate.look(110, FAR, nodes=seen(here, there))
    assert not gate.look(110, nodes=seen(here, there))
    assert gate.look(110, nodes=seen(here))
    assert (gate.look(110, nodes=seen(here), seconds=LIMIT_S), gate.reasons) == (True, []), "it may have been retired"
    assert not gate.look(110, nodes=seen(here, there))
    assert gate.reasons == [("MemoryNotReleased", "o")], "it is back, and its memory is not"
    assert gate.look(110, nodes=seen(here, replace(there, mem_available_bytes=110 * GIB))), "restarted"


def file(path: str, size: int, why: str = "") -> dict[str, object]:
    return {"path": path, "bytes": size, "removed": not why, "why": why}


async def made_ready(made: Scene, model: str) -> None:
    made.cluster.names = ["m", "k"]
    made.supervisor.want(model, Want.RUNNING, "admin")
    await made.tick()
    made.cluster.serve(model)
    await made.tick(3)
    assert made.state(model) == "READY"


async def test_the_stop_of_a_rank_tells_what_it_left_with_its_size(tmp_path: Path) -> None:
    removed = [file(f"/dev/shm/psm_{number}", 512 << 20) for number in range(4)]
    async with stage(tmp_path) as made:
        await make_ready(made)
        made.cluster.left = (*removed, file("/dev/shm/notes", 3 << 20, "nobody saw it"))
        made.supervisor.want("m", Want.STOPPED, "admin")
        await made.tick(4)

        removal, stays = (event for event in made.supervisor.journal.events(0, 100) if event.kind == "release")
        assert removal.data == {"node": "n", "removed_bytes": 2 * GIB}
        assert "/dev/shm/psm_0, /dev/shm/psm_1, /dev/shm/psm_2 and 1 more (2.0 GiB)" in removal.message
        assert lacking(stays.message, "/dev/shm/notes (3.0 MiB) on n", "nobody saw it", "`rm /dev/shm/notes` on n") == []


@pytest.mark.parametrize(("need_gib", "begins"), [(70, False), (40, True)], ids=["more than is free", "no more than is free"])
async def test_the_next_start_waits_for_what_it_needs(need_gib: int, begins: bool, tmp_path: Path) -> None:
    models = {"m": {"model": str(tmp_path), "memory_gib": need_gib}, "k": {"model": str(tmp_path), "memory_gib": 114}}
    async with stage(tmp_path, models=models) as made:
        made.cluster.offered = {"n": 114.0}
        await made_ready(made, "k")

        def show(available_gib: float) -> None:
            made.cluster.reading = replace(READING, mem_available_bytes=int(available_gib * GIB))

        show(50)
        made.cluster.show(host_bytes=60 * GIB)
        await made.tick(8)
        made.supervisor.want("k", Want.STOPPED, "admin")
        await made.tick(4)
        assert made.state("k") == "STOPPED"
        made.supervisor.want("m", Want.RUNNING, "admin")
        await made.tick(2)
        snapshot = made.supervisor.snapshot()
        assert (made.state("m") != "STOPPED", [(one.reason, one.node) for one in snapshot.conditions]) == (begins, [("MemoryReturns", "n")])
        assert (snapshot.models["m"].turn, made.cluster.log.count("spawn m")) == (None if begins else 1, int(begins))
        show(80)
        await made.tick(2)
        assert made.cluster.log.count("spawn m") == 1


async def test_a_load_waits_only_for_memory_of_nodes_that_it_would_use(tmp_path: Path) -> None:
    """Memory returns to `o`, and what is asked for goes to `n`."""
    models = {"m": {"model": str(tmp_path), "memory_gib": 70}}
    async with stage(tmp_path, models=models) as made:
        made.cluster.offered, made.cluster.agents = {"n": 114.0, "o": 114.0}, ("n", "o")
        made.cluster.node_readings = {"n": READING, "o": THERE}
        made.cluster.ranks = {FAR.handle.rank_id: replace(FAR, handle=replace(FAR.handle, model="other"))}
        await made.tick()
        made.cluster.ranks = {}
        made.supervisor.want("m", Want.RUNNING, "admin")
        await made.tick(2)
        assert [(one.reason, one.node) for one in made.supervisor.snapshot().conditions] == [("MemoryReturns", "o")]
        assert made.state("m") == "LOADING"


@pytest.mark.parametrize(("need_gib", "starts"), [(90, "small"), (60, "m")], ids=["more than is left", "fits beside it"])
async def test_memory_that_stays_away_counts_as_held_and_holds_up_no_smaller_model(need_gib: int, starts: str, tmp_path: Path) -> None:
    models = {"k": 114, "m": need_gib, "small": 20}
    given = {name: {"model": str(tmp_path), "memory_gib": gib} for name, gib in models.items()}
    async with stage(tmp_path, models=given) as made:
        made.cluster.offered = {"n": 114.0}
        await made_ready(made, "k")
        made.cluster.reading = replace(READING, mem_available_bytes=50 * GIB)
        made.cluster.show(host_bytes=60 * GIB)
        await made.tick(8)
        made.supervisor.want("k", Want.STOPPED, "admin")
        await made.tick(4)
        made.cluster.reading = replace(READING, mem_available_bytes=77 * GIB)
        await made.tick(seconds=LIMIT_S)
        assert [(one.reason, one.node) for one in made.supervisor.snapshot().conditions] == [("MemoryNotReleased", "n")]
        made.supervisor.want("m", Want.RUNNING, "admin")
        await made.tick(2)
        made.supervisor.want("small", Want.RUNNING, "admin")
        await made.tick(2)
        assert [line for line in made.cluster.log if line.startswith("spawn")][1] == f"spawn {starts}"
        assert (made.state("m") == "FAILED") is (starts != "m")
