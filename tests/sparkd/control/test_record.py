"""A model's record: each of its values is changed by one module."""

from __future__ import annotations

from tests.bench.shape import modules, record_writers


def test_each_value_of_a_record_has_one_writer() -> None:
    writers = record_writers(modules())

    assert writers["desired"] == {"sparkd.control.wishes"}
    assert writers["state"] == {"sparkd.control.effects"}
    assert {value: at for value, at in writers.items() if len(at) > 1} == {}
