"""Whose runtime counts where the daemon's own node has none."""

from __future__ import annotations

from typing import Any

import pytest

from sparkd.capacity.node_runtime import NodeRuntime, runtime_in_sight
from sparkd.errors import AgentLost, RankError

FACTS = {"platform": "cpu", "vllm": "0.32.0", "entrypoint": "tests.stub", "packages": "p"}
NONE = {"platform": "cpu", "vllm": None, "entrypoint": None, "packages": "n"}
MISSING = RankError("The runtime /x cannot be run.")


@pytest.mark.parametrize(
    ("nodes", "node", "only"),
    [
        ([FACTS, FACTS], "0", None),
        ([MISSING, AgentLost("silent"), FACTS], "2", {"2"}),
        ([MISSING, FACTS, NONE, FACTS | {"packages": "q"}], "1", {"1", "3"}),
        ([NONE, NONE], "0", None),
    ],
)
async def test_another_nodes_runtime_counts_where_this_one_has_none(nodes: list[Any], node: str, only: set[str] | None) -> None:
    async def ask_one(name: str) -> Any:
        if isinstance(nodes[int(name)], Exception):
            raise nodes[int(name)]
        return nodes[int(name)]

    found = await runtime_in_sight([str(number) for number in range(len(nodes))], ask_one, vllm=True)
    assert found == NodeRuntime(nodes[int(node)], node, None if only is None else frozenset(only))
