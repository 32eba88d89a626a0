"""Whatever the cluster or the store raises, the loop ticks on, other models serve on, and all is well once the fault is gone.

The methods are found by inspection: one that is added to a seam is tried without a word here, and named below where nothing calls it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from sparkd.admin.fabric import fabric_of
from sparkd.admin.streams import log_of
from sparkd.cluster.cluster import Cluster
from sparkd.cluster.launcher import Launcher
from sparkd.cluster.model_files import ModelFiles
from sparkd.cluster.placer import Placer
from sparkd.config.config import BackoffSettings
from sparkd.metrics import REGISTRY
from sparkd.state.nouns import Progress, RankFact, RankHandle, Want
from sparkd.state.store import History, Store, StoredRanks, StoredWishes
from tests.support.fakes import FakeCluster, Scene, stage
from tests.support.faulty_sparkd import ERRORS, public, wrap

UP = Progress(phase="serving", server_up=True)
Faults = tuple[Callable[[], BaseException], ...]


# The fake lacks the methods of the cluster that only the daemon uses.
OF_CLUSTER = [name for seam in (Cluster, Launcher, Placer, ModelFiles) for name in public(seam) if hasattr(FakeCluster, name)]
STORE_PARTS = {"wishes": StoredWishes, "ranks": StoredRanks, "history": History}
OF_STORE = [f"{part}.{name}" for part, seam in STORE_PARTS.items() for name in public(seam)]


class Faulty:
    """While `fault` is set, wrapped methods raise it."""

    def __init__(self) -> None:
        self.fault: Callable[[], BaseException] | None = None
        self.raised = 0

    def wrap(self, target: object, name: str) -> None:
        wrap(target, name, self._check)

    def wrap_store(self, store: Store, name: str) -> None:
        part, _, method = name.partition(".")
        wrap(getattr(store, part), method, self._check)

    def _check(self) -> None:
        if self.fault is not None:
            self.raised += 1
            raise self.fault()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkd.control.rank_stopper.ENDING", BackoffSettings(initial_s=1e-9, max_s=1e-9))


def errors() -> float:
    return sum(one.value for family in REGISTRY.collect() for one in family.samples if one.name == "sparkd_internal_errors_total")


def ranks_of(made: Scene, model: str) -> list[RankFact]:
    return [fact for fact in (made.cluster.ranks or {}).values() if fact.handle.model == model]


def change(made: Scene, model: str, **changes: Any) -> None:
    for fact in ranks_of(made, model):
        (made.cluster.ranks or {})[fact.handle.rank_id] = replace(fact, **changes)


def leave_stray(made: Scene, number: int) -> None:
    raw = RankHandle(f"stray-{number}", "gone", 1, "n", 0, 42, 7, "b", "/run/s", None, None, None, "h", "/log/gone", 0.0)
    (made.cluster.ranks or {})[raw.rank_id] = RankFact(raw, True, 3, None, False, UP)


async def tick(made: Scene, times: int = 1, seconds: float = 1.0) -> None:
    """The loop ticks, and what serves serves."""
    for _ in range(times):
        made.clock.now_s += seconds
        change(made, "m", progress=UP)
        await made.settle()
        await made.supervisor.tick()
        assert made.supervisor.snapshot().tick_age_s == 0
        await made.settle()
        assert made.state("other") == "READY"


async def live(made: Scene, number: int) -> None:
    """All that can happen to a model: unloaded, loaded, dead, its remains, a stranger's."""
    wish = made.supervisor.want
    for want in (Want.STOPPED, Want.RUNNING):
        with suppress(Exception):
            wish("m", want, "admin")
        await tick(made, 3)
    change(made, "m", alive=False, processes=0, exit_code=1)
    leave_stray(made, number)
    await tick(made, 3)
    await tick(made, 3, seconds=400.0)


# A cancellation that comes from elsewhere is the strangest; of the other errors each method raises another.
_OTHERS = [error for error in ERRORS if not isinstance(error(), asyncio.CancelledError)]
_SEAMS = list(dict.fromkeys([("cluster", name) for name in OF_CLUSTER] + [("store", name) for name in OF_STORE]))
NEVER_CALLED = {
    *("ask", "expect", "parsers", "runtime"),
    *("wishes.forget_desired", "ranks.handles", "history.behind_newest", "history.events_behind", "history.operations", "wishes.specs"),
}
NOT_CALLED_IN_A_LIFE = NEVER_CALLED | {
    *("abilities", "ask_all", "fabric", "read_log", "transport", "unlinked", "unusable"),
    *("wishes.desired", "wishes.forget_spec", "wishes.save_spec", "ranks.answered", "history.events"),
}
NOT_CALLED_IN_A_TAKEOVER = NEVER_CALLED | {
    *("destroy", "place", "start"),
    *("wishes.save_desired", "ranks.forget_handle", "ranks.save_answered"),
}


def cases(not_called: set[str]) -> list[Any]:
    return [
        pytest.param(seam, name, (asyncio.CancelledError, _OTHERS[number % len(_OTHERS)]), id=f"{seam}-{name}")
        for number, (seam, name) in enumerate(_SEAMS)
        if name not in not_called
    ]


@pytest.mark.parametrize(("seam", "name", "faults"), cases(NOT_CALLED_IN_A_LIFE))
async def test_whatever_a_seam_raises_the_loop_goes_on_and_all_is_well_afterwards(
    seam: str, name: str, faults: Faults, tmp_path: Path
) -> None:
    faulty, cluster = Faulty(), FakeCluster()
    if seam == "cluster":
        faulty.wrap(cluster, name)
    models = {one: {"model": str(tmp_path / "model")} for one in ("m", "other")}
    async with stage(tmp_path, cluster=cluster, models=models) as made:
        if seam == "store":
            faulty.wrap_store(made.store, name)
        cluster.names = ["m", "other"]
        for one in ("other", "m"):
            made.supervisor.want(one, Want.RUNNING, "admin")
            await made.tick(2)
            change(made, one, progress=UP)
            await made.tick(2)
        serving = ranks_of(made, "other")
        assert made.state("m") == made.state("other") == "READY"

        for number, fault in enumerate(faults):
            faulty.fault, before, raised = fault, errors(), faulty.raised
            await live(made, number)
            assert faulty.raised > raised, "nothing calls it"
            assert errors() > before or isinstance(fault(), OSError)
            faulty.fault = None
            await tick(made, 3, seconds=400.0)
            with suppress(Exception):
                made.supervisor.want("m", Want.RUNNING, "admin")
            await tick(made, 6, seconds=2.0)

            assert made.state("m") == "READY", (fault(), made.supervisor.snapshot().models["m"])
            assert ranks_of(made, "other") == serving
            assert ranks_of(made, "gone") == []
            assert len(ranks_of(made, "m")) == 1


async def use(made: Scene) -> None:
    """Every verb that others have; what is raised is theirs."""
    supervisor, operator, cluster = made.supervisor, made.operator, cast(Any, made.cluster)
    raw = {"model": "/somewhere"}
    for ask in (
        lambda: log_of(supervisor.registry, cluster, "m", None, 100),
        lambda: cluster.ask_all("host", None),
        lambda: cluster.unlinked(rdma=True),
        lambda: fabric_of(supervisor.registry, cluster),
        lambda: operator.unusable("new", raw),
    ):
        with suppress(Exception, asyncio.CancelledError):
            await ask()
    for do in (
        lambda: operator.add("new", raw),
        lambda: operator.remove("new"),
        lambda: supervisor.journal.events(0, 10),
        lambda: operator.operation(supervisor.want("m", Want.RUNNING, "admin").id),
    ):
        with suppress(Exception, asyncio.CancelledError):
            do()


@pytest.mark.parametrize(("seam", "name", "faults"), cases(NOT_CALLED_IN_A_TAKEOVER))
async def test_whatever_is_raised_while_a_daemon_takes_over_what_runs_is_kept(seam: str, name: str, faults: Faults, tmp_path: Path) -> None:
    """Over two nodes, so that it is judged how the ranks talk, too."""
    faulty, cluster = Faulty(), FakeCluster()
    cluster.nodes = cluster.agents = ("n", "o")
    if seam == "cluster":
        faulty.wrap(cluster, name)
    async with stage(tmp_path, cluster=cluster) as made:
        if seam == "store":
            faulty.wrap_store(made.store, name)
        cluster.names = ["m"]
        made.supervisor.want("m", Want.RUNNING, "admin")
        await made.tick(2)
        change(made, "m", progress=UP)
        await made.tick(2)
        serving = ranks_of(made, "m")
        assert made.state() == "READY" and len(serving) == 2

        for fault in faults:
            made.take_over()
            faulty.fault, raised = fault, faulty.raised
            await made.tick(3)
            await use(made)
            await made.tick(2)
            assert faulty.raised > raised, "nothing calls it"
            assert made.supervisor.snapshot().tick_age_s == 0
            faulty.fault = None
            made.supervisor.want("m", Want.RUNNING, "admin")
            await made.tick(6, seconds=2.0)

            assert made.state() == "READY", (fault(), made.supervisor.snapshot().models["m"])
            assert ranks_of(made, "m") == serving
