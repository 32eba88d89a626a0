"""The table of legal steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkd.errors import StateError
from sparkd.state.model_state import LEGAL, STARTING, ModelState, check_step


def test_every_state_can_fail_or_be_stopped_and_comes_to_rest() -> None:
    for state in ModelState:
        reachable, frontier = {state}, {state}
        while frontier:
            frontier = {new for old in frontier for new in LEGAL[old]} - reachable
            reachable |= frontier
        assert {ModelState.STOPPED, ModelState.FAILED, ModelState.READY} <= reachable


def test_starting_states_never_go_backwards() -> None:
    order = [ModelState.PLANNED, ModelState.LOADING, ModelState.WARMING, ModelState.SIZING, ModelState.READY]

    assert not [(old, new) for i, old in enumerate(order) for new in order[:i] if new in LEGAL[old] and new in STARTING]


@given(st.sampled_from(ModelState), st.sampled_from(ModelState))
def test_check_step_is_the_table(old: ModelState, new: ModelState) -> None:
    if new in LEGAL[old]:
        check_step(old, new)
    else:
        with pytest.raises(StateError, match=f"{old} to {new}"):
            check_step(old, new)
