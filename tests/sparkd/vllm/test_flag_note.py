"""A note about a flag comes back whole from another process."""

from __future__ import annotations

import pickle

import pytest

from sparkd.vllm.flag_note import FlagNote


@pytest.mark.parametrize(
    "note", [FlagNote("seed", "gone."), FlagNote("seed", "it: is: gone.", shown="--seed=3"), FlagNote("X", "no.", "X=1")]
)
def test_it_is_pickled(note: FlagNote) -> None:
    other = pickle.loads(pickle.dumps(note))
    assert (other, other.name, other.reason, type(other)) == (note, note.name, note.reason, FlagNote)
