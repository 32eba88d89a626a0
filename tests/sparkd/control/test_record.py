"""A model's record: each of its values is changed by one module."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from sparkd import control
from sparkd.control.record import Attempt, Record
from sparkd.state.nouns import Desired, Want

CONTROL = Path(control.__file__).parent
# `record.state = ..`, also in one statement with others.
ASSIGNED = re.compile(r"^\s+((?:(?:\w+\.)*record\.\w+(?:, )?)+) [-+]?= ", re.MULTILINE)


def test_each_value_of_a_record_has_one_writer() -> None:
    writers = defaultdict[str, set[str]](set)
    for file in CONTROL.glob("*.py"):
        for targets in ASSIGNED.findall(file.read_text()):
            for value in re.findall(r"record\.(\w+)", targets):
                writers[value].add(file.stem)

    assert (writers["desired"], writers["state"], writers["attempt"]) == ({"desired_states"}, {"effects"}, {"effects"})
    assert {value: at for value, at in writers.items() if len(at) > 1} == {}


def test_nothing_of_an_attempt_lives_on_in_the_next() -> None:
    record = Record("m", Desired("m", Want.RUNNING, 1, "admin", 0.0), 0.0, 0.0)
    record.hash = "h"
    ended = replace(record.attempt, rank_id="m-1", nodes=("n", "o"), memory_gib=4.0, adopted=True, load_s=9.0)
    record.attempt = ended
    record.fail("RankDied", "It died.", 10.0, lasts=True, client_message="It failed.")

    record.begin_attempt(5.0)
    assert record.attempt == Attempt(5.0, "h")
    record.attempt = replace(ended, message="It ends.")
    record.forget_rank()
    assert record.attempt == Attempt(0.0, load_s=9.0), "swaps are judged by the time that the load took"
