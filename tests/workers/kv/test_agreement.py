"""What the ranks of one engine settle together: none rehearses while another does not."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkd.errors import MissingSymbol
from tests.support.facts import facts
from tests.support.waiting import HUNG_S
from tests.workers.kv.test_sizing import BLOCK, DEMAND, NEED, STOCK, Machine, at_once
from workers.kv.agreement import Course, Vote, course_of
from workers.kv.arithmetic import GIB, CacheCosts, Demand
from workers.kv.profiles import MeasuredProfile, Profiles, key_of
from workers.kv.settings import CacheSettings
from workers.kv.sizing import EXIT_CODE, Sizing

__all__ = ["at_once"]  # a fixture


def vote(rank: int, *, learned: bool = False, plenty: bool = False, setbacks: int = 0) -> Vote:
    return Vote(rank, learned, plenty, setbacks)


@pytest.mark.parametrize(
    ("votes", "course"),
    [
        ([vote(0, learned=True), vote(1, learned=True)], Course("profile")),
        ([vote(0, learned=True), vote(1)], Course("rehearsal", why="1")),
        ([vote(0), vote(1)], Course("rehearsal")),
        ([vote(0, plenty=True, learned=True), vote(1, plenty=True)], Course("limit", why="1")),
        ([vote(0, plenty=True), vote(1)], Course("rehearsal", why="1")),
        ([vote(0, learned=True, setbacks=1), vote(1, setbacks=2)], Course("rehearsal", 2, "1 2")),
        # A stage of a pipeline without a cache goes with the others.
        ([vote(0, learned=True), Vote(1)], Course("profile")),
        ([vote(0), Vote(1, refusal="No room.")], Course("rehearsal", refusal="rank 1: No room.")),
        ([Vote(0, missing="no x"), vote(1)], Course("rehearsal", missing="no x")),
        ([Vote(0, missing="no x"), Vote(1, refusal="No room.")], Course("rehearsal", refusal="rank 1: No room.")),
    ],
)
def test_all_ranks_do_the_same(votes, course):
    made = course_of(votes)
    assert (made if made.why is None else replace(made, why=facts(made.why))) == course
    told = [course_of(votes, own) for own in range(len(votes))]
    assert len({(one.source, one.setbacks, one.why, bool(one.refusal), bool(one.missing)) for one in told}) == 1


class Table:
    """Where ranks in threads say what they found."""

    def __init__(self, ranks: int) -> None:
        self._said: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks, timeout=HUNG_S)

    def gather(self, rank: int) -> Callable[[Any], Sequence[Any]]:
        def say(mine: Any) -> Sequence[Any]:
            self._said[rank] = mine
            self._barrier.wait()
            found = list(self._said)
            self._barrier.wait()
            return found

        return say


class Rank:
    """One of an engine's ranks, with folders of its own as on a node of its own."""

    def __init__(self, folder: Path, number: int, room: int) -> None:
        self.folder, self.number = folder / str(number), number
        self.folder.mkdir(parents=True, exist_ok=True)
        self.machine = Machine(room, DEMAND)
        self.settings: dict[str, Any] = {}
        self.codes: list[int] = []
        self.need: Callable[[], CacheCosts] = lambda: NEED
        self.about = {"model": "m", "world": [2, 1, number]}

    @property
    def profiles(self) -> Profiles:
        return Profiles(str(self.folder / "profiles"))

    def learn(self, demand: Demand = DEMAND) -> None:
        self.profiles.keep(key_of(self.about), MeasuredProfile(demand, 1.0), self.about)

    def run(self, table: Table) -> Sizing | int | str:
        known = CacheSettings(margin_bytes=GIB, profiles=str(self.folder / "profiles"), report=str(self.folder / "report"), **self.settings)
        gather = table.gather(self.number)
        sizing = Sizing(self.machine, known, self.need, lambda: self.about, self.number, leave=self.codes.append, gather=gather)
        try:
            return sizing.determine(lambda _limit: STOCK)
        except ValueError as refused:
            return str(refused)

    def told(self) -> dict[str, Any]:
        (path,) = self.folder.glob("report*")
        found: dict[str, Any] = json.loads(path.read_text())["cache"]
        return found


def start(*ranks: Rank) -> list[Any]:
    table = Table(len(ranks))
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: rank.run(table), ranks))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Rank, Rank]:
    return Rank(tmp_path, 0, 40 * GIB), Rank(tmp_path, 1, 38 * GIB)


def test_a_profile_is_used_by_all_or_none(pair):
    one, other = pair
    one.learn()
    sizes = start(one, other)
    assert sizes == [int(35.5 * GIB), int(33.5 * GIB)]
    for rank in pair:
        assert rank.machine.did == ["rehearse 1.0"]
        assert (rank.told()["source"], facts(rank.told()["source_why"])) == ("rehearsal", "1")

    other.learn()
    for rank in pair:
        rank.machine.did.clear()
    assert start(one, other) == sizes
    assert [(rank.machine.did, rank.told()["source"], rank.told()["source_why"]) for rank in pair] == [(["warm"], "profile", None)] * 2


def test_a_profile_that_does_not_fit_on_one_rank_is_rehearsed_again_by_all(pair):
    one, other = pair
    one.learn()
    other.learn(Demand(graphs=90 * GIB))
    assert start(one, other) == [int(35.5 * GIB), int(33.5 * GIB)]
    assert [rank.machine.did for rank in pair] == [["warm", "rehearse 1.0"]] * 2
    assert facts(one.told()["source_why"]).startswith("1 8192 1.01 0.00 38.0 90.0 ")


def test_what_is_plenty_for_one_is_not_for_all(pair):
    one, other = pair
    other.machine.room = 12 * GIB
    for rank in pair:
        rank.settings = {"sequences": 4}
    assert start(one, other) == [4 * GIB + BLOCK] * 2
    assert [rank.machine.did for rank in pair] == [["rehearse 1.0"]] * 2
    assert (one.told()["source"], facts(one.told()["source_why"])) == ("rehearsal", "1")


def test_the_most_setbacks_are_every_ranks(pair):
    one, other = pair
    one.learn()
    other.learn()
    other.profiles.set_back(key_of(other.about))
    start(one, other)
    assert [rank.machine.did for rank in pair] == [["rehearse 0.5"]] * 2
    assert other.profiles.setbacks(key_of(other.about)) == 0


def test_a_rank_without_room_refuses_for_all_before_anything_runs(pair):
    one, other = pair
    other.machine.room = GIB // 4
    said = start(one, other)
    assert facts(said[1]).startswith("0.50 0.25 33.0 ")
    assert said[0] == f"rank 1: {said[1]}"
    assert [rank.machine.did for rank in pair] == [[], []]
    assert one.told()["why"] == said[0]


def test_a_rank_that_runs_out_while_others_wait_for_it_ends_its_process(pair):
    one, other = pair
    other.machine.ran_out = "CUDA out of memory"
    sizes = start(one, other)
    assert (sizes[0], one.codes, other.codes) == (int(35.5 * GIB), [], [EXIT_CODE])
    assert other.told()["phase"] == "refused"


def test_a_symbol_that_one_rank_lacks_leaves_it_to_vllm_on_all(pair):
    one, other = pair

    def need() -> CacheCosts:
        raise MissingSymbol("it is missing", symbol="get_kv_cache_groups")

    other.need = need
    assert start(one, other) == [STOCK] * 2
    assert [rank.machine.did for rank in pair] == [[], []]
    assert facts(one.told()["why"]) == "1 get_kv_cache_groups"
