"""The pure decision, as a table of (facts, expected actions)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from sparkd.config.config import BackoffSettings
from sparkd.config.groups import GroupSettings
from sparkd.control.decision import DEAF_S, Adopt, Ask, Destroy, Expire, Fail, MarkStopped, Move, Place, Stop
from sparkd.control.record import Record
from sparkd.state.model_state import ModelState
from sparkd.state.nouns import Progress, RankFact, RankHandle, Wait, Want
from tests.support.facts import lacking
from tests.support.model_records import changed, planned, record_of

NOW_S = 1000.0
HASH = "0123456789abcdef"
S = ModelState

HANDLE = RankHandle(
    rank_id="r1",
    model="m",
    generation=1,
    node_id="n",
    rank=0,
    pid=42,
    start_ticks=7,
    boot_id="b",
    socket_path="/run/x.sock",
    host=None,
    port=None,
    api_key_path=None,
    config_hash=HASH,
    log_path="/log",
    started_at_s=0.0,
)
ALIVE = RankFact(HANDLE, alive=True, processes=3, exit_code=None, stop_ordered=False, progress=Progress(phase="loading"))
UP = replace(ALIVE, progress=Progress(phase="serving", server_up=True))
DEAD = replace(ALIVE, alive=False, processes=0, exit_code=0)
OTHER = replace(ALIVE, handle=replace(HANDLE, rank_id="r0"))
OUTDATED = replace(ALIVE, handle=replace(HANDLE, rank_id="r0", config_hash="ffffffffffffffff"))
CHANGED = replace(UP, handle=replace(HANDLE, config_hash="ffffffffffffffff"))

SOCKET_LOST = Fail("m", "SocketLost", "Its socket /run/x.sock was removed, so no request reaches it; sparkd starts it again.")

RUNNING = record_of("m", state_since_s=NOW_S - 5, config_hash=HASH, attempt_since_s=NOW_S - 5, last_used_s=NOW_S - 5)
STOPPED = changed(RUNNING, want=Want.STOPPED)


def running(state: ModelState, *ranks: RankFact, **changes: object) -> Record:
    return changed(RUNNING, state=state, ranks=ranks, rank_id="r1", **changes)


def stopped(state: ModelState, *ranks: RankFact, **changes: object) -> Record:
    return changed(STOPPED, state=state, ranks=ranks, rank_id="r1", **changes)


TABLE = {
    # towards running
    "a stopped model that is wanted is placed": (RUNNING, [Place("m")]),
    "a stopped model that nobody wants rests": (STOPPED, []),
    "a living rank of an earlier daemon is adopted": (changed(RUNNING, ranks=(ALIVE,)), [Adopt("m", "r1")]),
    "a rank that was told to stop is not adopted": (
        changed(RUNNING, ranks=(replace(ALIVE, stop_ordered=True),)),
        [Destroy("r1", "m", "it is not the present rank of its model")],
    ),
    "a rank of another configuration is destroyed": (
        changed(RUNNING, ranks=(OUTDATED,)),
        [Destroy("r0", "m", "its configuration changed")],
    ),
    "the remains of a rank are cleared away first": (
        changed(RUNNING, ranks=(DEAD,)),
        [Destroy("r1", "m", "it died while no daemon watched it")],
    ),
    "a second rank beside the present one is destroyed": (
        running(S.READY, UP, OTHER),
        [Destroy("r0", "m", "it is not the present rank of its model")],
    ),
    "a living rank that nobody wants is destroyed": (
        changed(STOPPED, ranks=(ALIVE,)),
        [Destroy("r1", "m", "it is not the present rank of its model")],
    ),
    "nothing is decided where nobody could look": (changed(RUNNING, state=S.READY, rank_id="r1", ranks=None), []),
    "one action at a time": (changed(RUNNING, busy="place", state=S.PLANNED), []),
    "a failed model waits for its back-off": (changed(RUNNING, state=S.FAILED, backoff_until_s=NOW_S + 1), []),
    "then it is placed again": (changed(RUNNING, state=S.FAILED, backoff_until_s=NOW_S), [Place("m")]),
    "the rank of a failed attempt is removed": (
        running(S.FAILED, ALIVE, backoff_until_s=NOW_S + 9),
        [Destroy("r1", "m", "the attempt it belonged to failed")],
    ),
    "a placement that was lost is tried again": (
        changed(RUNNING, state=S.PLANNED),
        [Fail("m", "PlacementLost", "The placement ended without a result; it is tried again.")],
    ),
    "an unconfigured model is never placed": (changed(RUNNING, config_hash=None), []),
    "an engine whose socket was removed is started again": (running(S.READY, replace(UP, deaf=True), deaf_s=DEAF_S), [SOCKET_LOST]),
    "also one that was adopted": (running(S.LOADING, replace(UP, deaf=True), deaf_s=DEAF_S), [SOCKET_LOST]),
    "one that has just removed it may be ending": (running(S.READY, replace(UP, deaf=True), deaf_s=DEAF_S - 0.1), []),
    # progress
    "the log says warming": (running(S.LOADING, replace(ALIVE, progress=Progress(phase="warming"))), [Move("m", S.WARMING)]),
    "the log says sizing": (running(S.LOADING, replace(ALIVE, progress=Progress(phase="sizing"))), [Move("m", S.SIZING)]),
    "a state never goes back": (running(S.SIZING, ALIVE, last_asked_s=NOW_S), []),
    "a server that is up is asked": (running(S.SIZING, UP), [Ask("m")]),
    "but not more often than once a second": (running(S.SIZING, UP, last_asked_s=NOW_S - 0.5), []),
    "a silent log does not hide a server": (running(S.LOADING, ALIVE, last_asked_s=NOW_S - 6), [Ask("m")]),
    "and is asked seldom": (running(S.LOADING, ALIVE, last_asked_s=NOW_S - 4), []),
    # ready
    "a ready model is left alone": (running(S.READY, UP), []),
    "an idle one is unwanted after its ttl": (running(S.READY, UP, ttl_s=5.0), [Expire("m", 5.0)]),
    "not while a request is in flight": (running(S.READY, UP, ttl_s=5.0, in_flight=1), []),
    "not while a request waits": (running(S.READY, UP, ttl_s=5.0, queued=1), []),
    "ttl 0 is never": (running(S.READY, UP, ttl_s=0.0, last_used_s=-1e9), []),
    "a changed configuration drains first": (running(S.READY, CHANGED, in_flight=2), [Move("m", S.DRAINING)]),
    "a changed configuration stops an idle engine": (running(S.READY, CHANGED), [Stop("m")]),
    "a changed configuration ends a load": (running(S.LOADING, CHANGED), [Stop("m")]),
    "wanted again while draining": (running(S.DRAINING, UP, in_flight=1), [Move("m", S.READY)]),
    "wanted again while stopping: first the stop": (running(S.STOPPING, UP), [Stop("m")]),
    "wanted again once it is stopped": (running(S.STOPPING), [MarkStopped("m")]),
    # towards stopped
    "an idle engine is stopped at once": (stopped(S.READY, UP), [Stop("m")]),
    "a busy one is drained": (stopped(S.READY, UP, in_flight=1), [Move("m", S.DRAINING)]),
    "draining waits": (stopped(S.DRAINING, UP, in_flight=1, state_since_s=NOW_S - 59), []),
    "not for ever": (stopped(S.DRAINING, UP, in_flight=1, state_since_s=NOW_S - 60), [Stop("m")]),
    "drained": (stopped(S.DRAINING, UP), [Stop("m")]),
    "a load is cancelled": (stopped(S.LOADING, ALIVE), [Stop("m")]),
    "a placement is cancelled": (changed(STOPPED, state=S.PLANNED), [Stop("m")]),
    "stopping goes on until nothing is left": (stopped(S.STOPPING, DEAD), [Stop("m")]),
    "then it rests": (stopped(S.STOPPING), [MarkStopped("m")]),
    "a failed one rests at once": (changed(STOPPED, state=S.FAILED), [MarkStopped("m")]),
    "a failed one with remains is stopped first": (stopped(S.FAILED, ALIVE), [Stop("m")]),
}


@pytest.mark.parametrize(("facts", "expected"), TABLE.values(), ids=TABLE.keys())
def test_plan_of_one_model(facts: Record, expected: list[object]) -> None:
    assert planned(facts) == expected


@pytest.mark.parametrize("state", [S.LOADING, S.WARMING, S.SIZING, S.READY, S.DRAINING])
@pytest.mark.parametrize("exit_code", [0, 1, -9, None])
def test_any_exit_that_was_not_ordered_is_a_failure(state: ModelState, exit_code: int | None) -> None:
    (action,) = planned(running(state, replace(DEAD, exit_code=exit_code)))

    assert isinstance(action, Fail)
    assert action.reason == "EngineExited"
    how = {0: "exit code 0", 1: "exit code 1", -9: "signal SIGKILL", None: "killed, with no exit code left behind"}[exit_code]
    assert f"({how})" in action.message and "sparkd logs m" in action.message


@pytest.mark.parametrize(
    "error",
    [
        None,
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)",
        "EngineCore encountered a fatal error.",
    ],
)
def test_of_an_engine_that_lost_its_core_no_exit_code_is_told(error: str | None) -> None:
    """The shim saw its API server end in order."""
    fact = replace(DEAD, exit_code=0, progress=Progress(server_up=True, lost="its engine core was lost", last_error=error))
    (action,) = planned(running(S.READY, fact))
    told = "The engine ended by itself (its engine core was lost). See `sparkd logs m`."
    assert action == Fail("m", "EngineExited", told)
    why = replace(fact.progress, last_error="RuntimeError: CUDA error: an illegal memory access")
    (action,) = planned(running(S.READY, replace(fact, progress=why)))
    assert isinstance(action, Fail) and lacking(action.message, "lost", "RuntimeError: CUDA error: an illegal memory access") == []


def test_the_epitaph_quotes_the_last_error_of_the_log() -> None:
    fact = replace(DEAD, exit_code=1, progress=Progress(last_error="ValueError: no room"))

    (action,) = planned(running(S.LOADING, fact))

    assert isinstance(action, Fail)
    assert "ValueError: no room" in action.message


@pytest.mark.parametrize("fact", [ALIVE, DEAD], ids=["while the engine lives on", "once it ended"])
def test_why_a_load_failed_is_what_the_loader_says(fact: RankFact) -> None:
    failed = Progress(phase="loading", failure="a.safetensors: it is cut off: fetch it again", last_error="RuntimeError: engine")
    (action,) = planned(running(S.LOADING, replace(fact, progress=failed)))
    assert isinstance(action, Fail) and (action.model, action.reason) == ("m", "LoadFailed")
    assert action.message.startswith(failed.failure or "-") and lacking(action.message, "`sparkd logs m`") == []

    lasting = replace(fact, progress=replace(failed, failure_lasts=True))
    (action,) = planned(running(S.LOADING, lasting))
    assert isinstance(action, Fail) and action.reason == "LoadRefused"

    (action,) = planned(running(S.READY, replace(DEAD, progress=replace(failed, server_up=True))))
    assert isinstance(action, Fail)
    assert action.reason == "EngineExited", "it served after that"


@pytest.mark.parametrize("fact", [ALIVE, DEAD], ids=["while the engine lives on", "once it ended"])
def test_why_a_cache_was_refused_is_what_its_worker_says(fact: RankFact) -> None:
    refused = Progress(phase="sizing", kv={"phase": "refused", "why": "3 GiB are needed and 1 GiB is left."}, last_error="ValueError: no")
    (action,) = planned(running(S.SIZING, replace(fact, progress=refused)))
    assert action == Fail("m", "KvCacheDoesNotFit", "3 GiB are needed and 1 GiB is left. See `sparkd logs m`.")

    for later in (replace(refused, server_up=True), replace(refused, kv={"phase": "ready"})):
        (action,) = planned(running(S.READY, replace(DEAD, progress=later)))
        assert isinstance(action, Fail)
        assert action.reason == "EngineExited"


def test_a_rank_without_any_trace_is_a_failure() -> None:
    (action,) = planned(running(S.READY))

    assert isinstance(action, Fail)
    assert action.reason == "RankLost"


def test_a_start_that_is_late_and_still_moves_has_longer_but_not_for_ever() -> None:
    facts = running(S.SIZING, UP, start_deadline_s=60.0, attempt_since_s=NOW_S - 60, last_asked_s=NOW_S)

    assert planned(changed(facts, still_s=59.0)) == []
    latest = changed(facts, still_s=0.0, attempt_since_s=NOW_S - 180)
    assert planned(changed(latest, silent_s=299.0)) == []
    for late in (changed(facts, still_s=60.0), changed(latest, silent_s=300.0)):
        (action,) = planned(late)
        assert isinstance(action, Fail) and action.reason == "StartTimeout"


@pytest.mark.parametrize(
    ("state", "dark_s", "busy", "fails"),
    [(S.READY, 9.9, None, False), (S.READY, 10.0, None, True), (S.READY, 60.0, "stop", False), (S.LOADING, 60.0, None, False)],
)
def test_clients_do_not_wait_for_a_node_that_gives_no_sign_of_life(state: S, dark_s: float, busy: str | None, fails: bool) -> None:
    found = planned(changed(running(state, UP), ranks=None, unseen=True, dark_s=dark_s, busy=busy))

    assert [action.reason for action in found if isinstance(action, Fail)] == (["NodeLost"] if fails else [])
    assert len(found) == fails


def test_a_start_that_takes_too_long_fails_even_while_the_server_is_asked() -> None:
    facts = running(S.SIZING, UP, start_deadline_s=60.0, attempt_since_s=NOW_S - 60)

    (action,) = planned(facts)

    assert isinstance(action, Fail)
    assert action.reason == "StartTimeout"


def test_only_one_model_starts_at_a_time_and_one_that_is_waited_for_goes_first() -> None:
    assert planned(changed(RUNNING, name="a"), changed(RUNNING, name="b", queued=3)) == [Place("b")]


def test_nothing_is_placed_while_another_model_loads() -> None:
    loading = changed(running(S.LOADING, ALIVE, last_asked_s=NOW_S), name="b")

    assert planned(changed(RUNNING, name="a"), loading) == []


# Ways in which an engine may yet take memory that another would count as free.
TAKES_MEMORY = {
    "it is being placed": changed(RUNNING, state=S.PLANNED, busy="place", ranks=None),
    "it is being placed again after a crash": changed(RUNNING, state=S.FAILED, busy="place", ranks=None),
    "it loads": running(S.LOADING, ALIVE),
    "its server is asked": running(S.SIZING, UP, busy="ask"),
    "it loads on two nodes, one of which is not seen": running(S.LOADING, ALIVE, world=2, unseen=True),
    "it loads on a node that is not seen": changed(running(S.LOADING), ranks=None),
    "it is adopted in this moment": changed(RUNNING, ranks=(ALIVE,)),
    "an earlier daemon started it and nobody wants it": changed(STOPPED, ranks=(ALIVE,)),
    "it failed and a rank of its start lives": running(S.FAILED, ALIVE),
    "a rank of an earlier start lives beside it": running(S.READY, UP, OTHER),
    "what is left of it is being removed": changed(running(S.FAILED), busy="destroy", ranks=None),
    "it gives way and its load is being ended": stopped(S.STOPPING, ALIVE, state_since_s=NOW_S - 59),
    "its engine may take longer to end": stopped(S.STOPPING, ALIVE, state_since_s=NOW_S - 320, stop_timeout_s=300),
    "it is no longer configured": None,
}


@pytest.mark.parametrize("other", TAKES_MEMORY.values(), ids=TAKES_MEMORY)
def test_two_engines_never_size_from_the_same_free_memory(other: Record | None) -> None:
    """Whichever comes first in the plan, and whichever nodes they share: each counts as free what the other is about to take."""
    strangers, wanted = (ALIVE,) if other is None else (), changed(RUNNING, name="b", queued=3)
    for name in ("a", "c"):
        beside = [] if other is None else [changed(other, name=name, last_asked_s=NOW_S)]
        assert not [action for action in planned(wanted, *beside, strangers=strangers) if isinstance(action, Place)]
        assert planned(wanted, changed(running(S.READY, UP), name=name)) == [Place("b")]


def test_a_load_does_not_keep_others_from_stopping() -> None:
    loading = changed(running(S.LOADING, ALIVE, last_asked_s=NOW_S), name="b")

    assert planned(changed(stopped(S.READY, UP), name="a"), loading) == [Stop("a")]


def test_nothing_is_placed_while_ray_is_away_but_adoption_goes_on() -> None:
    models = changed(RUNNING, name="a"), changed(RUNNING, name="b", ranks=(ALIVE,))

    assert planned(*models, block_reason=Wait("RayStarting", "It waits for Ray to start.")) == [Adopt("b", "r1")]


def test_strangers_are_destroyed() -> None:
    (action,) = planned(strangers=(ALIVE,))
    assert isinstance(action, Destroy) and (action.rank_id, action.model) == ("r1", "m")


def test_a_model_is_unloaded_after_its_ttl_together_with_its_companions() -> None:
    ties = GroupSettings(accompany=(("a", "b"),)).ties({"a": "a", "b": "b"})
    idle = changed(running(S.READY, UP, ttl_s=5.0), name="a")
    beside = changed(running(S.READY, UP, last_used_s=NOW_S - 4), name="b")

    assert planned(idle, beside, ties=ties) == []
    assert planned(idle, beside) == [Expire("a", 5.0)]
    assert planned(idle, changed(beside, last_used_s=NOW_S - 5), ties=ties) == [Expire("a", 5.0)]
    assert planned(idle, changed(beside, last_used_s=NOW_S - 5, in_flight=1), ties=ties) == []


@pytest.mark.parametrize(("failures", "base_s"), [(1, 10), (2, 20), (3, 40), (5, 160), (6, 300), (60, 300), (1025, 300), (10**9, 300)])
def test_backoff_doubles_up_to_its_cap_within_its_jitter(failures: int, base_s: float) -> None:
    delays = [BackoffSettings().delay_s(failures, random.Random(seed)) for seed in range(200)]

    assert min(delays) >= base_s * 0.75
    assert max(delays) <= base_s * 1.25
    assert max(delays) - min(delays) > base_s * 0.3
