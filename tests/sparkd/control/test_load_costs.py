"""Which loads evictions have caused and what that leaves of the budget: for ever, over restarts, and where loads fail."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.control.load_costs import Loads, recalled
from sparkd.control.residency import EARNED_S
from sparkd.state.nouns import Event, ModelState, Want
from tests.sparkd.control.test_scheduler import change, fill, make_ready, two
from tests.support.fakes import Scene, stage


class Course:
    """One node with room for one model, whose loads all succeed but for those in `failing`. What happens is told as events, too."""

    def __init__(self, loads_s: list[float], failing: frozenset[int] = frozenset()) -> None:
        self.loads_s, self.failing = loads_s, failing
        self.now_s = self.loading_s = 0.0
        self.loads = Loads(0.0)
        self.events: list[Event] = []
        self.there = 0
        self._load(0)

    def ask(self, model: int, share: float) -> None:
        """As soon as may be; share: of its load after which one that fails does."""
        before, covers_at_s = self.there, self.loads.budget.covers_at_s(self.loads_s[self.there])
        self.now_s = max(self.now_s, covers_at_s)
        self.loads.advance(self.now_s)
        self._tell("swap", before, to=str(model))
        self.loads.evict(str(before), str(model))
        self._tell("state", before, new="STOPPED")
        self._load(model, share)
        if model in self.failing:
            self._load(before)
        else:
            self.there = model

    def _load(self, model: int, share: float = 1.0) -> None:
        seconds = self.loads_s[model] * (share if model in self.failing else 1.0)
        end = ModelState.FAILED if model in self.failing else ModelState.READY
        self._stand(model, ModelState.PLANNED)
        self.now_s += seconds
        self.loading_s += seconds
        self.loads.advance(self.now_s)
        self._stand(model, end)
        self.loads.end(str(model), seconds, end)
        self.loads.advance(self.now_s)

    def _stand(self, model: int, state: ModelState) -> None:
        self.loads.stand(str(model), state)
        self._tell("state", model, new=state.value)

    def _tell(self, kind: str, model: int, **data: str) -> None:
        self.events.append(Event(len(self.events) + 1, self.now_s, kind, str(model), "", data))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(1, 300), min_size=2, max_size=6), st.sets(st.integers(1, 5)), st.integers(0, 1 << 30), st.sampled_from([True, False])
)
def test_less_than_half_of_the_time_is_spent_on_loading_whoever_asks(
    loads_s: list[float], failing: set[int], seed: int, cycles: bool
) -> None:
    """Another is asked for as soon as one is READY, in a circle or any; some never are. A full budget, two loads that may begin at its
    end, and the first load come on top once."""
    rng, course = random.Random(seed), Course(loads_s, frozenset(failing))
    for turn in range(200):
        others = [model for model in range(len(loads_s)) if model != course.there]
        course.ask(others[turn % len(others)] if cycles else rng.choice(others), rng.random())
    assert course.loading_s <= EARNED_S * (course.now_s - course.loading_s) + 5 * max(loads_s) + 1e-6


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.floats(1, 300), min_size=2, max_size=4), st.sets(st.integers(1, 3)), st.integers(1, 40), st.floats(0, 1000))
def test_the_events_tell_what_is_left(loads_s: list[float], failing: set[int], turns: int, later_s: float) -> None:
    """wall and monotonic seconds differ, and the next daemon begins some time later."""
    course = Course(loads_s, frozenset(failing))
    rng = random.Random(turns)
    for _ in range(turns):
        course.ask(rng.choice([model for model in range(len(loads_s)) if model != course.there]), rng.random())
    course.loads.advance(course.now_s + later_s)
    found = recalled(course.events, course.now_s + later_s - 5e5, course.now_s + later_s)
    assert found.budget.spent_s == pytest.approx(course.loads.budget.spent_s, abs=1e-3)
    assert found.budget.full_s == pytest.approx(course.loads.budget.full_s)


def test_an_eviction_causes_one_load_of_each_and_no_later_one() -> None:
    loads = Loads(0.0)
    loads.evict("a", "b")
    spent_s = []
    for now_s in (10.0, 20.0):
        loads.stand("b", ModelState.LOADING)
        loads.advance(now_s)
        spent_s.append(loads.budget.spent_s)
        loads.stand("b", ModelState.READY)
    assert spent_s == [10.0, 10.0 - EARNED_S * 10.0]


def test_a_load_that_another_daemon_began_costs_until_the_next_one_looks() -> None:
    """It is gone by then, and nobody adopts it."""
    told = [
        ("swap", "a", {"to": "b"}, 0),
        ("state", "b", {"new": "PLANNED"}, 10),
        ("state", "b", {"new": "LOADING"}, 11),
        ("settled", None, {}, 30),
    ]
    events = [Event(seq, at_s, kind, model, "", data) for seq, (kind, model, data, at_s) in enumerate(told, 1)]
    assert recalled(events[:3], 25, 25).budget.spent_s == pytest.approx(15)
    assert recalled(events, 40, 40).budget.spent_s == pytest.approx(20 - 10 * EARNED_S)


async def changes(made: Scene, restarts: bool, *names: str, load_s: int = 40) -> list[str]:
    """The state of each model 6 s after somebody asked for it."""
    states = []
    for name in names:
        states.append((await change(made, name, load_s))[0])
        if restarts:
            for record in made.supervisor.registry.records.values():
                record.close_upstream()
            made.take_over()
            made.cluster.names = ["a", "b"]
            await made.tick(3)
    return states


@pytest.mark.parametrize("restarts", [False, True], ids=["one daemon", "a daemon after each change"])
async def test_a_restart_gives_nothing_of_the_budget_back(tmp_path: Path, restarts: bool) -> None:
    async with stage(tmp_path, models=two(tmp_path), min_residency_s=0, backoff__initial_s=300) as made:
        # An adopted engine of this cluster holds 4 GiB.
        made.cluster.offered = {"n": 13}
        made.supervisor.want("a", Want.RUNNING, "config")
        await made.tick(40)
        await make_ready(made, "a")
        assert await changes(made, restarts, "b", "a", "b", "b") == ["LOADING", "LOADING", "STOPPED", "STOPPED"]


async def test_a_slow_model_stays_known_as_slow_while_it_loads_again(tmp_path: Path) -> None:
    async with stage(tmp_path, models=two(tmp_path), min_residency_s=0, backoff__initial_s=300) as made:
        await fill(made, "config")
        assert await changes(made, False, "b", load_s=200) == ["LOADING"]
        assert await changes(made, False, "a", load_s=10) == ["LOADING"]
        assert await changes(made, False, "b", load_s=200) == ["LOADING"]
        assert await changes(made, False, "a", load_s=10) == ["STOPPED"]


async def test_a_load_that_fails_costs_what_it_took(tmp_path: Path) -> None:
    """And so does the load of the one that comes back."""
    async with stage(tmp_path, models=two(tmp_path), swap_idle_s=0, min_residency_s=0) as made:
        await fill(made, "config")
        for attempt in (1, 2):
            made.cluster.names = None
            made.supervisor.want("b", Want.RUNNING, "request")
            made.supervisor.registry.find("b").queue.promised_at_s = made.clock.now_s
            await made.tick(6)
            assert (made.state("a"), made.state("b")) == ("STOPPED", "LOADING"), attempt
            await made.tick(100)
            made.supervisor.registry.find("b").queue.promised_at_s = None
            made.cluster.show(alive=False, processes=0, exit_code=1)
            await made.tick(20)
            await make_ready(made, "a")
            made.supervisor.registry.find("b").backoff_until_s = made.clock.now_s
            if attempt == 1:
                assert 100 < made.supervisor._swap._loads.budget.spent_s < 140
        assert made.supervisor._swap._loads.budget.spent_s > 200
        made.supervisor.want("b", Want.RUNNING, "request")
        made.supervisor.registry.find("b").queue.promised_at_s = made.clock.now_s
        await made.tick(6)
        assert (made.state("a"), made.state("b")) == ("READY", "STOPPED")
