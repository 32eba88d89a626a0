"""Large bodies that cost the parser the most: they are bounded, and one is read per turn of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from sparkd.errors import BadRequest, BodyTooLarge
from sparkd.gateway import proxy
from sparkd.gateway.body import LARGE_BYTES, MOST_MEMBERS, members_of_json, refuse_many_members
from tests.sparkd.gateway.fakes import Running, is_ours, post

MIB = 1 << 20
CHAT = "/v1/chat/completions"


def array(item: bytes, size: int = 2 * MIB) -> bytes:
    return b'{"model":"tiny","x":[' + (item + b",") * (size // (len(item) + 1)) + item + b"]}"


READ = {
    "digits": array(b"1"),
    "floats": array(b"-1.0000000000000002e+16"),
    "texts": array(b'"' + b"[" * 3000 + b'"', MOST_MEMBERS // 2),
    "escapes": b'{"model":"tiny","x":"' + b"\\n" * MIB + b'"}',
    "wide": b'{"model":"tiny","x":"' + "\u00fc".encode() * MIB + b'"}',
    "spaces": b'{"model":"tiny","x":1' + b" " * (2 * MIB) + b"}",
    "late": b'{"x":"' + b"y" * (2 * MIB) + b'","model":"tiny"}',
}
REFUSED = {
    "objects": (BodyTooLarge, array(b"{}")),
    "lists": (BodyTooLarge, array(b"[" * 900 + b"]" * 900)),
    "a list for a model": (BodyTooLarge, b'{"model":[' + b"{}," * MIB + b"{}]}"),
    "nested": (BodyTooLarge, b'{"model":"tiny","x":' + b"[" * (2 * MIB) + b"}"),
    "one member again and again": (BodyTooLarge, b'{"model":"tiny",' + b'"store":1,' * MOST_MEMBERS + b'"x":1}'),
    "no end": (BadRequest, READ["escapes"][:-2]),
    "no UTF-8": (BadRequest, b'{"model":"tiny","x":"' + b"\xff" * (2 * MIB) + b'"}'),
}


@pytest.mark.parametrize("name", READ)
async def test_a_large_body_reaches_the_engine_as_it_came(gateway: Running, name: str) -> None:
    assert len(READ[name]) > LARGE_BYTES or name == "texts"
    assert (await gateway.post(CHAT, READ[name])).status == 200
    assert gateway.engine.heard[-1].body == READ[name]


@pytest.mark.parametrize("name", REFUSED)
async def test_what_would_cost_the_most_is_refused(gateway: Running, name: str) -> None:
    error, body = REFUSED[name]
    assert len(body) > LARGE_BYTES
    assert is_ours(await gateway.ask(post(CHAT, body)), error.status)
    assert not gateway.engine.heard


def test_lists_and_members_are_counted_to_the_last() -> None:
    most = b"[" * (MOST_MEMBERS // 4) + b"{" * (MOST_MEMBERS // 4) + b":" * (MOST_MEMBERS // 2)
    refuse_many_members(most)
    for one in (b"[", b"{", b":"):
        with pytest.raises(BodyTooLarge):
            refuse_many_members(most + one)


def test_tools_are_not_built_by_the_million() -> None:
    def tools(size: int) -> bytes:
        return b'{"tools":[' + b"{}," * (size // 3) + b'{"type":"function"}]}'

    assert members_of_json(tools(LARGE_BYTES // 2)).functions
    assert not members_of_json(tools(2 * LARGE_BYTES)).functions


async def test_one_large_body_is_read_per_turn_of_the_loop(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    course: list[str] = []

    def read(body: bytes | bytearray, plain: Callable[[bytes | bytearray], Any] = members_of_json) -> Any:
        course.append("read")
        return plain(body)

    async def turns() -> None:
        while True:
            course.append("turn")
            await asyncio.sleep(0)

    monkeypatch.setattr(proxy, "members_of_json", read)
    edge_proxy, bodies = gateway.edge._proxy, 5
    ticker = asyncio.create_task(turns())
    members = await asyncio.gather(*(edge_proxy._members(READ["digits"]) for _ in range(bodies)))
    ticker.cancel()

    assert [each.model for each in members] == ["tiny"] * bodies
    reads = [place for place, what in enumerate(course) if what == "read"]
    assert len(reads) == bodies
    assert all("turn" in course[one:other] for one, other in pairwise(reads))


async def test_bodies_that_are_read_at_once_do_not_mix(gateway: Running) -> None:
    names = [f"m{number}" for number in range(20)]
    bodies = [b'{"model":"%b","x":"%b"}' % (name.encode(), b"y" * (2 * MIB if number % 2 else 10)) for number, name in enumerate(names)]
    members = await asyncio.gather(*(gateway.edge._proxy._members(body) for body in bodies))
    assert [each.model for each in members] == names

    parsed = await asyncio.gather(*(asyncio.to_thread(members_of_json, body) for body in bodies))
    assert [each.model for each in parsed] == names
