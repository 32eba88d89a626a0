"""Nodes out of sight: what is missing, for how long, and when the time does not run."""

from __future__ import annotations

import pytest

from sparkd.cluster.node_tracker import NODE_GRACE_S, NodeTracker, missing_condition, unusable_condition
from sparkd.errors import AgentLost, ClusterError, CodeDiffers
from sparkd.state.snapshot import NodeView
from tests.support.fakes import READING

LATE_S = NODE_GRACE_S + 1


@pytest.mark.parametrize(
    ("looks", "missing"),
    [
        ([({"a", "b"}, True, 0)], set()),
        ([({"a", "b"}, True, 0), ({"a"}, True, 1)], {"b"}),
        ([({"a", "b"}, True, 0), ({"a"}, True, NODE_GRACE_S)], {"b"}),
        ([({"a", "b"}, True, 0), ({"a"}, True, LATE_S)], set()),
        ([({"a", "b"}, True, 0), ({"a"}, True, 1), ({"a", "b"}, True, 2)], set()),
        ([({"a", "b"}, True, 0), ({"a"}, False, LATE_S)], {"b"}),
        ([({"a", "b"}, True, 0), ({"a"}, False, LATE_S), ({"a"}, True, 2 * LATE_S - 2)], {"b"}),
        ([({"a", "b"}, True, 0), ({"a"}, False, LATE_S), ({"a"}, True, 2 * LATE_S)], set()),
        ([({"a"}, True, 0)], set()),
    ],
    ids=[
        "both seen", "one missing", "still within the grace", "gone", "back again",
        "nobody could look", "the grace begins with the first look", "and ends", "never seen",
    ],
)  # fmt: skip
def test_a_node_is_missing_for_a_while_and_then_gone(looks: list[tuple[set[str], bool, float]], missing: set[str]) -> None:
    sight = NodeTracker()
    found: tuple[NodeView, ...] = ()
    for seen, could_look, now_s in looks:
        found = sight.look(nodes(*sorted(seen)), could_look=could_look, now_s=now_s)
    assert {node.node_id for node in found} == missing


def test_a_missing_node_is_shown_as_it_was_but_without_a_reading() -> None:
    sight = NodeTracker()
    sight.look(nodes("a", "b"), could_look=True, now_s=0)
    (missing,) = sight.look(nodes("a"), could_look=True, now_s=1)

    assert (missing.unified_memory_gib, missing.agent, missing.reading) == (100.0, False, None)
    condition = missing_condition([missing])
    assert condition is not None and (condition.reason, condition.node) == ("NodeUnseen", "b")
    assert missing_condition([]) is None


def test_a_node_where_an_earlier_daemon_left_ranks_is_missing_until_it_is_seen() -> None:
    sight = NodeTracker()
    sight.expect({"b"}, 0)

    assert [node.address for node in sight.look(nodes("a"), could_look=False, now_s=100)] == ["b"]
    assert [node.address for node in sight.look(nodes("a"), could_look=True, now_s=101)] == ["b"]
    assert sight.look(nodes("a", "b"), could_look=True, now_s=102) == ()


def nodes(*names: str) -> list[NodeView]:
    return [NodeView(name, name, name == "a", True, READING, 100.0, 0.0) for name in names]


@pytest.mark.parametrize(
    ("unmet", "ahead_s", "reason", "number"),
    [
        ({}, {"b": 4.0, "c": -4.0}, None, ""),
        ({}, {"b": 73.2}, "ClockSkew", "73 s ahead"),
        ({}, {"b": -6.0}, "ClockSkew", "6 s behind"),
        ({"b": AgentLost("Its agent did not start.")}, {"b": 73.2}, "NodeUnmet", "Its agent did not start."),
        ({"b": CodeDiffers("Ray on node b runs another.")}, {"b": 73.2}, "CodeDiffers", "Ray on node b runs another."),
    ],
)
def test_nodes_that_cannot_be_used_as_they_are(
    unmet: dict[str, ClusterError], ahead_s: dict[str, float], reason: str | None, number: str
) -> None:
    found = unusable_condition(unmet, ahead_s)

    assert (found and (found.reason, found.node)) == (reason and (reason, "b"))
    assert number in (found.message if found else "")


def test_a_node_that_refuses_where_its_raylet_listened_has_none_until_it_listens_again_or_is_seen() -> None:
    sight = NodeTracker()
    sight.look(nodes("a", "b"), could_look=True, now_s=0)
    told = []
    for refused in (True, False, True):
        sight.heard("b", 1, refused=refused)
        told.append(set(sight.no_raylet))
    sight.look(nodes("a", "b"), could_look=True, now_s=2)

    assert [*told, set(sight.no_raylet)] == [{"b"}, set(), {"b"}, set()]


def test_a_connection_that_is_accepted_is_a_sign_of_life_only_while_its_agent_was_heard_a_moment_ago() -> None:
    sight = NodeTracker()
    sight.look(nodes("a", "b"), could_look=True, now_s=0)
    for at_s in range(1, 40):
        sight.heard("b", at_s, refused=False)

    assert sight.dark_s("b", 40) == 20
    sight.heard("b", 41, refused=True)
    assert sight.dark_s("b", 41) == 0


def test_while_the_daemon_was_held_no_node_was_dark() -> None:
    """Its agent may not answer the first look after that: Ray has given the daemon up meanwhile."""
    sight, dark = NodeTracker(), []
    for at_s, both in ((0, True), (1, True), (2, False), (3, False), (203, False), (204, False)):
        sight.begin(at_s)
        missing = sight.look(nodes("a", "b") if both else nodes("a"), could_look=True, now_s=at_s)
        dark.append([sight.dark_s(node.node_id, at_s) for node in missing])
    assert dark == [[], [], [1], [2], [2], [3]]
    sight.heard("b", 205, refused=False)
    assert sight.dark_s("b", 205) == 0


def test_a_node_whose_agent_answers_and_cannot_look_is_not_given_up() -> None:
    sight = NodeTracker()
    sight.look(nodes("a", "b"), could_look=True, now_s=0.0)
    for now_s in range(5, 300, 5):
        sight.begin(float(now_s))
        sight.stays("b", float(now_s))
        missing = sight.look(nodes("a"), could_look=True, now_s=float(now_s))

        assert [node.node_id for node in missing] == ["b"]
        assert sight.dark_s("b", float(now_s)) == 0
