"""A note about a flag comes back whole from another process."""

from __future__ import annotations

import pickle

from sparkd.vllm.flag_note import FlagNote


def test_it_is_pickled() -> None:
    note = FlagNote("seed", "it: is: gone.", shown="--seed=3")
    other = pickle.loads(pickle.dumps(note))
    assert (other, other.name, other.reason, type(other)) == (note, note.name, note.reason, FlagNote)
