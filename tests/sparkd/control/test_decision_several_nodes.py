"""Ranks of one model are one engine: what the plan decides of them, and how far they are together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparkd.control.decision import Adopt, Ask, Destroy, Fail, MarkStopped, Move, Place, Stop
from sparkd.control.record import Record
from sparkd.state.combined_progress import progress_of
from sparkd.state.model_state import ModelState
from sparkd.state.nouns import Progress, RankFact, Want
from tests.sparkd.control.test_decision import ALIVE, HANDLE, HASH, NOW_S, RUNNING
from tests.support.facts import lacking
from tests.support.model_records import changed, planned
from workers.rank.signatures import Diagnosis

S = ModelState
FIRST = replace(ALIVE, handle=replace(HANDLE, world=2, attempt="r1"))
SECOND = replace(ALIVE, handle=replace(HANDLE, rank_id="r1-r1", node_id="o", rank=1, pid=43, socket_path=None, world=2, attempt="r1"))
UP = replace(FIRST, progress=Progress(phase="serving", server_up=True))
SIZED = replace(SECOND, progress=Progress(phase="sizing"))
DEAD = replace(SECOND, alive=False, processes=0, exit_code=-9)
HELD = replace(SECOND, halted=True)
STALE = replace(SECOND, handle=replace(SECOND.handle, rank_id="r0-r1", attempt="r0"))


def team(state: ModelState, *ranks: RankFact, **changes: object) -> Record:
    return changed(RUNNING, state=state, ranks=ranks, rank_id="r1", world=2, **changes)


def failed(*ranks: RankFact, state: ModelState = S.READY, **changes: object) -> tuple[str, str]:
    (action,) = planned(team(state, *ranks, **changes))
    assert isinstance(action, Fail), action
    return action.reason, action.message


TABLE = {
    "all of them alive are left alone": (team(S.READY, UP, SIZED), []),
    "a slow rank holds the state": (team(S.LOADING, replace(FIRST, progress=Progress(phase="sizing")), SECOND, last_asked_s=NOW_S), []),
    "all have gone on": (
        team(S.LOADING, *(replace(one, progress=Progress(phase="warming")) for one in (FIRST, SECOND))),
        [Move("m", S.WARMING)],
    ),
    "rank 0 serves for all": (team(S.SIZING, UP, SIZED), [Ask("m")]),
    "a failed start is removed whole": (
        team(S.FAILED, UP, DEAD, backoff_until_s=NOW_S + 9),
        [Destroy("r1", "m", "the attempt it belonged to failed")],
    ),
    "nothing starts while a node of it is out of sight": (
        changed(team(S.FAILED, unseen=True), rank_id=None, backoff_until_s=NOW_S - 1),
        [],
    ),
    "nor is it stopped for good": (changed(team(S.STOPPING, unseen=True), want=Want.STOPPED), []),
    "what is seen of it is": (changed(team(S.STOPPING, UP, unseen=True), want=Want.STOPPED), [Stop("m")]),
    "a node that comes back finds no other start": (changed(team(S.STOPPING), want=Want.STOPPED), [MarkStopped("m")]),
    "then it starts again": (changed(team(S.FAILED), rank_id=None, backoff_until_s=NOW_S - 1), [Place("m")]),
    "a stale rank is fenced": (team(S.READY, UP, SIZED, STALE), [Destroy("r0", "m", "it is not the present rank of its model")]),
    "whole, it is adopted": (changed(RUNNING, ranks=(UP, SIZED)), [Adopt("m", "r1")]),
    "a part of it is not": (changed(RUNNING, ranks=(SIZED,)), [Destroy("r1", "m", "the other ranks of its start have ended")]),
    "a part waits for the node that is out of sight": (changed(RUNNING, ranks=(UP,), unseen=True), []),
    "with a dead rank it is not adopted": (changed(RUNNING, ranks=(UP, DEAD)), [Destroy("r1", "m", "it died while no daemon watched it")]),
    "a short silence is waited for": (team(S.READY, UP, unseen=True, dark_s=5.0), []),
    "one look at a rank that is stopped too": (team(S.READY, UP, HELD, halted_s=0.5), []),
    "a question under way does not hide nothing": (team(S.SIZING, UP, SIZED, busy="ask"), []),
    "strangers go start by start": (RUNNING, [Place("m")]),
}


@pytest.mark.parametrize(("facts", "expected"), TABLE.values(), ids=TABLE.keys())
def test_plan_of_a_model_with_two_ranks(facts: Record, expected: list[object]) -> None:
    assert planned(facts) == expected


def test_a_rank_that_is_gone_fails_all() -> None:
    reason, message = failed(UP, DEAD)
    assert (reason, message.split(" ended")[0]) == ("EngineExited", "Rank 1 of 2, on o,")
    reason, message = failed(UP)
    assert (reason, message.startswith("Rank 1 of 2 ")) == ("RankMissing", True)
    assert failed()[0] == "RankLost"


def test_the_rank_that_says_why_is_quoted() -> None:
    first = replace(FIRST, alive=False, exit_code=1)
    second = replace(DEAD, progress=Progress(last_error="RuntimeError: no device"))

    assert "RuntimeError: no device" in failed(first, second)[1]


INDEX = Progress(last_error="IndexError: list index out of range", error_at_s=100.0, line_at_s=101.0)
CLOSED = Progress(last_error="RuntimeError: Connection closed by peer", error_at_s=99.0, line_at_s=101.0)
BROKEN = Progress(last_error="RuntimeError: no device", error_at_s=100.5, line_at_s=101.0)
AGED = replace(FIRST, progress=replace(INDEX, error_at_s=86_500.0, line_at_s=86_501.0), cause_age_s=2.0)
GONE = Diagnosis("RankGone", 2, "Another rank ended.", "Look there.")
ENDED = replace(SECOND, alive=False, processes=0, exit_code=1)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (AGED, ENDED, "Rank 1 of 2, on o, ended 1 rank 0: IndexError logs m`"),
        (AGED, replace(ENDED, progress=BROKEN, cause_age_s=1.5), "Rank 1 of 2, on o, ended 1 rank 0: IndexError logs m`"),
        (AGED, replace(ENDED, progress=BROKEN, cause_age_s=2.5), "Rank 1 of 2, on o, ended 1 its log: no device --rank 1"),
        (replace(FIRST, progress=CLOSED, diagnosis=GONE), replace(ENDED, progress=BROKEN), "Rank 1 its log: no device --rank 1"),
        (replace(FIRST, alive=False, exit_code=1, progress=CLOSED, diagnosis=GONE), DEAD, "Rank 1 SIGKILL --rank 1"),
        (replace(FIRST, progress=replace(INDEX, line_at_s=900.0)), ENDED, "Rank 1 ended 1 --rank 1"),
        (AGED, DEAD, "Rank 1 SIGKILL --rank 1"),
    ],
    ids=[
        "the one that ended knows nothing (executor: ray)",
        "the earlier error, whatever the clocks of the two nodes say",
        "also of the other rank",
        "what follows from another's end is no cause",
        "nor where both have ended",
        "an error of long ago is another story",
        "who was killed needs no error",
    ],
)
def test_of_several_ranks_the_first_error_speaks(first: RankFact, second: RankFact, said: str) -> None:
    reason, message = failed(first, second)
    assert (reason, lacking(message, *said.split())) == ("EngineExited", [])
    assert ("IndexError" in message) == ("IndexError" in said)


@pytest.mark.parametrize("state", [S.LOADING, S.WARMING, S.SIZING, S.READY, S.DRAINING])
def test_a_rank_that_lives_and_does_not_answer_fails_all(state: ModelState) -> None:
    reason, message = failed(UP, HELD, state=state, halted_s=1.0)
    assert (reason, message.startswith("Rank 1 on o ")) == ("RankHangs", True)
    assert failed(UP, state=state, unseen=True, dark_s=6.0)[0] == "NodeLost"
    reason, message = failed(UP, state=state, unseen=True, no_raylet="o", executor="ray")
    assert (reason, "on o " in message, "`executor: ray`" in message) == ("NodeLost", True, True)
    assert failed(UP, SIZED, state=state, frozen="Nothing moves.") == ("EngineFrozen", "Nothing moves.")
    alone = changed(RUNNING, state=state, rank_id=ALIVE.handle.rank_id, ranks=(ALIVE,), frozen="Nothing moves.", last_asked_s=NOW_S)
    assert planned(alone) == [Fail("m", "EngineFrozen", "Nothing moves.")]


def test_a_question_under_way_does_not_hide_a_dead_rank() -> None:
    assert failed(UP, DEAD, state=S.SIZING, busy="ask")[0] == "EngineExited"


def test_a_loader_that_fails_on_any_rank_fails_all_with_its_sentence() -> None:
    second = replace(SECOND, progress=Progress(failure="model.safetensors is cut off"))

    reason, message = failed(FIRST, second, state=S.LOADING)
    assert (reason, message.startswith(second.progress.failure or "-")) == ("LoadFailed", True)


def test_strangers_are_destroyed_start_by_start() -> None:
    (action,) = planned(strangers=(FIRST, SECOND))
    assert isinstance(action, Destroy) and (action.rank_id, action.model) == ("r1", "m")


def test_progress_adds_up_over_ranks() -> None:
    one = Progress(phase="loading", bytes_done=10, bytes_total=40, eta_s=3.0, fraction=0.25, kv_tokens=7)
    other = Progress(phase="starting", bytes_done=5, bytes_total=40, eta_s=8.0, fraction=0.125)
    found = progress_of([replace(SECOND, progress=other), replace(FIRST, progress=one)])

    assert found == replace(one, phase="starting", bytes_done=15, bytes_total=80, eta_s=8.0, fraction=0.125)
    silent = progress_of([replace(FIRST, progress=one), replace(SECOND, progress=Progress(phase="loading"))])
    assert silent is not None
    assert (silent.bytes_done, silent.eta_s, silent.fraction, silent.phase) == (None, None, None, "loading")
    assert progress_of([replace(FIRST, progress=one)]) is one
    assert progress_of([]) is None


def test_the_cache_of_the_smallest_rank_is_the_models() -> None:
    told = [{"phase": "ready", "rank": rank, "pool_bytes": (3 - rank) << 30, "ranks": 1, "by_rank": []} for rank in (0, 1)]
    one, other = (Progress(phase="serving", server_up=True, kv=each, kv_gib=3.0) for each in told)
    found = progress_of([replace(FIRST, progress=one), replace(SECOND, progress=other)])

    assert found is not None and found.kv is not None
    assert (found.kv["rank"], found.kv_gib, found.kv["ranks"]) == (1, 2.0, 2)


def test_the_hash_of_any_rank_counts() -> None:
    changed = replace(SIZED, handle=replace(SIZED.handle, config_hash="f" * 16))

    assert HASH != "f" * 16
    assert planned(team(S.READY, UP, changed)) == [Stop("m")]


def test_of_several_loaders_that_fail_the_first_speaks() -> None:
    first = replace(FIRST, progress=Progress(failure="the peer is gone"), cause_age_s=0.5)
    second = replace(SECOND, progress=Progress(failure="NaN in a.weight"), cause_age_s=1.0)

    assert failed(first, second, state=S.LOADING)[1].startswith("NaN in a.weight")
    combined = progress_of((first, second))
    assert combined is not None and combined.failure == "NaN in a.weight"
