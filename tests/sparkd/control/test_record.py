"""A model's record: each of its values is changed by one module."""

from __future__ import annotations

from dataclasses import replace

from sparkd.control.record import Attempt, Record
from sparkd.state.nouns import Desired, Want
from tests.support.record_writers import record_writers


def test_each_value_of_a_record_has_one_writer() -> None:
    writers = record_writers()

    assert writers["desired"] == {"sparkd.control.wishes"}
    assert writers["state"] == {"sparkd.control.effects"}
    assert {value: at for value, at in writers.items() if len(at) > 1} == {}
    assert writers["attempt"] == {"sparkd.control.effects"}


def test_nothing_of_an_attempt_lives_on_in_the_next() -> None:
    record = Record("m", Desired("m", Want.RUNNING, 1, "admin", 0.0), 0.0, 0.0)
    record.hash = "h"
    ended = replace(record.attempt, rank_id="m-1", nodes=("n", "o"), world=2, memory_gib=4.0, adopted=True, load_s=9.0)
    record.attempt = ended
    record.fail("RankDied", "It died.", 10.0, lasts=True, client_message="It failed.")

    record.begin_attempt(5.0)
    assert record.attempt == Attempt(5.0, "h")
    record.attempt = replace(ended, message="It ends.")
    record.forget_rank()
    assert record.attempt == Attempt(0.0, load_s=9.0), "swaps are judged by the time that the load took"
