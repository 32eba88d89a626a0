"""The book of unified memory and what Ray keeps: they are the same again whatever was lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from sparkd.cluster.ray_connection import RayLink
from sparkd.cluster.reservations import Places
from sparkd.errors import NoRoom, RayUnavailable
from sparkd.state.memory_book import Lack, MemoryBook
from tests.support.facts import lacking

A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"


class FakeRay:
    """Groups by model. away: it answers nothing; a release is then dropped, as RayLink does while it is not connected. full: nodes without
    room."""

    def __init__(self) -> None:
        self.groups: dict[str, tuple[int, tuple[str, ...]]] = {}
        self.away = False
        self.full: set[str] = set()
        self.log: list[str] = []
        self.slow = asyncio.Event()
        self.slow.set()

    async def reserve(self, model: str, gib: int, nodes: Sequence[str], timeout_s: float, *, devices: bool = False) -> bool:
        self._check()
        assert model not in self.groups, "Ray has one group of a name"
        self.log.append(f"reserve {model}")
        if not self.full.isdisjoint(nodes):
            return False
        self.groups[model] = (gib, tuple(nodes))
        return True

    async def release(self, model: str) -> None:
        if self.away:
            return
        await self.slow.wait()
        self.log.append(f"release {model}")
        self.groups.pop(model, None)

    async def kept_groups(self) -> dict[str, frozenset[str]]:
        self._check()
        return {model: frozenset(nodes) for model, (_, nodes) in self.groups.items()}

    def _check(self) -> None:
        if self.away:
            raise RayUnavailable("It does not answer.")


@pytest.fixture
def ray() -> FakeRay:
    return FakeRay()


@pytest.fixture
def places(ray: FakeRay) -> Places:
    return Places(ray, A, lambda: {A: 100.0, B: 100.0})  # type: ignore[arg-type]


async def test_what_was_released_while_ray_was_away_is_given_back(ray: FakeRay, places: Places) -> None:
    await places.reserve_one("m", 50)
    ray.away = True
    await places.release("m")
    ray.away = False
    assert ray.groups

    await places.reconcile((), ())

    assert ray.groups == {}


async def test_a_release_that_fails_is_no_failure_and_made_up_for(ray: FakeRay, places: Places) -> None:
    await places.reserve_one("m", 50)
    release = ray.release

    async def refused(model: str) -> None:
        raise RayUnavailable("It is busy.")

    ray.release = refused  # type: ignore[method-assign]
    await places.release("m")
    assert (places.reserved_gib(A), list(ray.groups)) == (0, ["m"])
    ray.release = release  # type: ignore[method-assign]
    await places.reconcile((), ())

    assert ray.groups == {}


@pytest.mark.parametrize(
    ("nodes", "there", "unseen", "stays"),
    [
        ((A,), (), (), False),
        ((A,), ("m",), (), True),
        ((A, B), (), (B,), True),
        ((C,), (), (), False),
    ],
    ids=["nothing of it runs", "a rank was seen", "one of its nodes is out of sight", "a node that is gone"],
)
async def test_a_group_that_nobody_booked_stays_while_something_of_it_may_run(
    ray: FakeRay, places: Places, nodes: tuple[str, ...], there: Collection[str], unseen: Collection[str], stays: bool
) -> None:
    ray.groups["m"] = (50, nodes)

    await places.reconcile(there, unseen)

    assert ("m" in ray.groups) is stays


async def test_what_is_booked_stays_and_is_made_again_where_ray_lost_it(ray: FakeRay, places: Places) -> None:
    await places.reserve_one("m", 50)
    places.hold("adopted", 20, [B])
    places.hold("away", 20, [C])

    await places.reconcile((), ())

    assert ray.groups == {"m": (50, (A,)), "adopted": (20, (B,))}
    assert ray.log == ["release m", "reserve m", "reserve adopted"], "what stands is not touched, and no node out of sight is asked for"


@pytest.mark.parametrize("kept_gib", [50, 49])
async def test_what_runs_stays_booked_where_ray_has_no_room_for_it_anew(ray: FakeRay, places: Places, kept_gib: int) -> None:
    places.hold("m", 50, [A])
    ray.groups["m"], ray.full = (kept_gib, (A,)), {A}

    await places.again([A])

    assert ray.groups == {"m": (kept_gib, (A,))}


async def test_a_start_that_is_refused_leaves_what_was_booked(ray: FakeRay, places: Places) -> None:
    await places.reserve_one("m", 50, only=B)
    ray.full = {A}

    with pytest.raises(NoRoom):
        await places.reserve_one("m", 60, only=A)

    assert (ray.groups, places.reserved_gib(B)) == ({"m": (50, (B,))}, 50)


async def test_the_connection_releases_nothing_where_it_is_refused() -> None:
    class Refusing(RayLink):
        async def _answer(self, ask: Callable[..., Any], *arguments: Any, timeout_s: float = 0.0) -> Any:
            asked.append(ask.__name__)
            return False

    asked: list[str] = []
    link = Refusing({}, lambda _: ())
    link.connected = True
    assert not await link.reserve("m", 50, [A], 1.0)
    assert asked == ["_reserve"]


async def test_a_late_release_does_not_take_what_was_reserved_since(ray: FakeRay, places: Places) -> None:
    await places.reserve_one("m", 50)
    ray.slow.clear()
    giving_back = [asyncio.create_task(places.release("m"))]
    await asyncio.sleep(0)
    reserving = asyncio.create_task(places.reserve_one("m", 60))
    giving_back.append(asyncio.create_task(places.reconcile((), ())))
    await asyncio.sleep(0)
    ray.slow.set()
    await asyncio.gather(reserving, *giving_back)

    assert ray.groups == {"m": (60, (A,))}
    assert places.reserved_gib(A) == 60


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
    ray: FakeRay, offered: dict[str, float], reserved: list[tuple[str, int]], need_gib: int, nodes: list[str]
) -> None:
    places = Places(ray, "a", lambda: offered)  # type: ignore[arg-type]
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
