"""The book of unified memory: what is booked where, and who is refused."""

from __future__ import annotations

import pytest

from sparkd.cluster.reservations import Reservations
from sparkd.errors import MemoryReturns, NoRoom
from sparkd.state.memory_book import Lack, MemoryBook
from tests.support.facts import lacking

A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"


@pytest.fixture
def places() -> Reservations:
    return Reservations(A, lambda: {A: 100.0, B: 100.0})


def test_a_start_that_is_refused_leaves_what_was_booked(places: Reservations) -> None:
    """The rank of an earlier start may live on a node out of sight."""
    places.hold("other", 60, [A])
    places.reserve_one("m", 50, only=B)
    before = places.book().held

    with pytest.raises(NoRoom):
        places.reserve_one("m", 60, only=A)
    with pytest.raises(NoRoom):
        places.reserve("m", 60, [A, B])

    assert places.book().held == before


def test_a_start_takes_the_place_of_what_its_model_held(places: Reservations) -> None:
    places.hold("m", 90, [C])
    places.reserve("m", 80, [A, B])

    assert [places.reserved_gib(node) for node in (A, B, C)] == [80, 80, 0]


def test_nodes_that_another_model_took_meanwhile_are_refused(places: Reservations) -> None:
    """The nodes of a team are asked questions between their choice and their reservation."""
    chosen = places.with_room("m", 60)
    places.reserve_one("faster", 60)

    with pytest.raises(NoRoom) as caught:
        places.reserve("m", 60, chosen)
    assert lacking(caught.value.message, "60", "2 nodes", "faster") == []


def test_memory_that_is_not_back_yet_is_waited_for(places: Reservations) -> None:
    places.cordon(frozenset(), {A: 10.0, B: 10.0}, {})

    with pytest.raises(MemoryReturns):
        places.reserve_one("m", 60)


def test_what_runs_is_booked_whatever_the_book_has_left(places: Reservations) -> None:
    places.hold("m", 80, [A])
    places.hold("adopted", 80, [A])

    assert (places.reserved_gib(A), places.with_room("n", 1)) == (160, [B])
    places.release("m")
    places.release("m")
    assert places.reserved_gib(A) == 80


@pytest.mark.parametrize(
    ("offered", "reserved", "need_gib", "nodes"),
    [
        ({"a": 4, "b": 6}, [], 3, ["a", "b"]),
        ({"a": 4, "b": 6}, [], 7, []),
        ({"a": 4, "b": 6}, [("a", 3), ("b", 3)], 3, ["b"]),
        ({"a": 4, "b": 6, "c": 8}, [], 1, ["a", "c", "b"]),
        ({"a": 4, "b": 6, "c": 6}, [("b", 1)], 5, ["c", "b"]),
        ({"a": 4}, [("gone", 3)], 4, ["a"]),
    ],
    ids=[
        "here first", "nowhere", "exactly", "then the emptiest", "what is free counts", "a node out of sight",
    ],
)  # fmt: skip
def test_a_model_goes_where_there_is_room(
    offered: dict[str, float], reserved: list[tuple[str, int]], need_gib: int, nodes: list[str]
) -> None:
    places = Reservations("a", lambda: offered)
    places.hold("m", 99, offered)  # its own is not in its way
    for number, (node, gib) in enumerate(reserved):
        places.hold(f"other{number}", gib, [node])
    assert places.with_room("m", need_gib) == nodes


def test_whose_end_would_make_room() -> None:
    book = MemoryBook({"a": 100.0, "b": 40.0}, {"big": (("a", 60),), "small": (("a", 20),), "other": (("b", 30),)})
    assert book.free_gib() == {"a": 20.0, "b": 10.0}
    message = book.no_room("m", Lack(50))
    assert lacking(message, "a 20 of 100", "b 10 of 40", "big") == []
    assert lacking(book.no_room("m", Lack(95)), "95 GiB", "big") == ["big"], "its end would not be enough"
    assert lacking(book.no_room("m", Lack(50, 2)), "50 GiB", "2 nodes") == []
    assert lacking(book.no_room("m", Lack(50, only="b")), "b 10 of 40", "a 20 of 100", "big") == ["a 20 of 100", "big"]
