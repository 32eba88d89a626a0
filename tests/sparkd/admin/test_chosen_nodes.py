"""Which nodes a pull or a measurement is for."""

from __future__ import annotations

import pytest

from sparkd.admin.chosen_nodes import ALL, chosen_nodes
from sparkd.errors import BadRequest
from tests.support.facts import lacking

THERE = ["10.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize(
    ("nodes", "chosen"),
    [
        (ALL, THERE),
        ("10.0.0.2", ["10.0.0.2"]),
        (["10.0.0.2", "10.0.0.1", "10.0.0.2"], ["10.0.0.2", "10.0.0.1"]),
    ],
)
def test_nodes_that_are_there(nodes: list[str] | str, chosen: list[str]) -> None:
    assert chosen_nodes(nodes, THERE) == chosen


@pytest.mark.parametrize("nodes", ["10.0.0.3", ["10.0.0.1", "10.0.0.3"]])
def test_a_node_that_is_not_there_is_named(nodes: list[str] | str) -> None:
    with pytest.raises(BadRequest) as refused:
        chosen_nodes(nodes, THERE)
    assert lacking(refused.value.message, "10.0.0.3", ", ".join(THERE)) == []
