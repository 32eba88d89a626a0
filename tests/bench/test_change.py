"""A change of model is taken apart into its parts."""

from __future__ import annotations

from tests.bench.change import change_of


def state(at_s: float, model: str, new: str) -> dict[str, object]:
    return {"kind": "state", "at_s": at_s, "model": model, "message": "", "data": {"new": new}}


def test_a_change_is_taken_apart_into_waiting_and_work() -> None:
    waits = {"kind": "waits", "at_s": 100.5, "model": "b", "message": "It waits for room.", "data": {}}
    first_try = [state(100.2, "b", "PLANNED"), state(100.4, "b", "STOPPED")]
    goes = [state(105.0, "a", "STOPPING"), state(107.0, "a", "STOPPED")]
    loads = [state(108.0, "b", "PLANNED"), state(108.5, "b", "LOADING"), state(147.0, "b", "READY")]
    found = change_of("b", True, 200, 100.0, 149.0, [*first_try, waits, *goes, *loads])
    assert (found.stays, found.ends, found.returns, found.loads, found.answers) == (5.0, 2.0, 1.0, 39.0, 2.0)
    assert (found.waiting, found.working, found.reasons) == (6.0, 43.0, ("It waits for room.",))


def test_one_that_is_there_waits_for_nothing() -> None:
    found = change_of("b", False, 200, 100.0, 101.0, [])
    assert (found.waiting, found.working) == (0.0, 1.0)
