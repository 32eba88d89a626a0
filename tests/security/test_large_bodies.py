"""Large bodies that cost a parser the most: they are read in pieces, and mean what they meant."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.errors import BadRequest, BodyTooLarge
from sparkd.gateway import outline as module
from sparkd.gateway.body import members_of_json
from sparkd.gateway.outline import MOST_BYTES, PIECE_BYTES, WHOLE_BYTES, outline
from tests.sparkd.gateway.fakes import Running, is_ours, post

MIB = 1 << 20
CHAT = "/v1/chat/completions"


def array(item: bytes, size: int = 6 * MIB) -> bytes:
    return b'{"model":"tiny","x":[' + (item + b",") * (size // (len(item) + 1)) + item + b"]}"


def string(piece: bytes) -> bytes:
    return b'{"model":"tiny","x":"' + piece * (6 * MIB // len(piece)) + b'"}'


READ = {
    "digits": array(b"1"),
    "floats": array(b"-1.0000000000000002e+16"),
    "escapes": string(b"\\n"),
    "wide": string("ü".encode()),
    "texts": array(b'"' + b"a" * 3000 + b'"'),
    "sentences": array(b'"' + b"some words, and [more]\\n" * 5 + b'"', 16 * MIB),
    "spaces": b'{"model":"tiny","x":1' + b" " * (6 * MIB) + b"}",
    "late": b'{"x":"' + b"y" * (6 * MIB) + b'","model":"tiny"}',
}
REFUSED = {
    "objects": (BodyTooLarge, array(b"{}")),
    "members": (BodyTooLarge, array(b'{"":1}')),
    "models": (BodyTooLarge, b"{" + b'"model":"tiny",' * (6 * MIB // 15) + b'"model":"tiny"}'),
    "few models": (BadRequest, b'{"x":"' + b"y" * MIB + b'",' + b'"model":"tiny",' * 9 + b'"model":"tiny"}'),
    "a list for a model": (BodyTooLarge, b'{"model":[' + b"{}," * (2 * MIB) + b"{}]}"),
    "nested": (BodyTooLarge, b'{"model":"tiny","x":' + b"[" * (6 * MIB) + b"}"),
    "a long number": (BadRequest, b'{"model":"tiny","x":' + b"1" * (6 * MIB) + b"}"),
    "no end": (BadRequest, string(b"y")[:-2]),
    "no end but a backslash": (BadRequest, string(b"y")[:-2] + b"\\"),
    "no UTF-8": (BadRequest, string(b"\xff")),
}


def stepped(body: bytes) -> tuple[bytes | bytearray, int]:
    """The outline, and how often the loop was given back on the way to it."""
    making, turns = outline(body, asyncio.Lock()), 0
    while True:
        try:
            making.send(None)
        except StopIteration as end:
            return end.value, turns
        turns += 1


@pytest.mark.parametrize("name", READ)
def test_the_loop_is_given_back_after_every_piece(name: str) -> None:
    made, turns = stepped(READ[name])
    assert members_of_json(made).model == "tiny"
    assert len(made) < MIB
    assert turns >= len(READ[name]) // (2 * PIECE_BYTES)


async def test_the_loop_is_given_back_after_every_piece_of_all_bodies() -> None:
    body, lock, bodies = READ["texts"], asyncio.Lock(), 8
    _, pieces = stepped(body)
    making = asyncio.gather(*(outline(body, lock) for _ in range(bodies)))
    turns = 0
    while not making.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= bodies * pieces


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_cost_the_most_is_refused(name: str) -> None:
    error, body = REFUSED[name]
    with pytest.raises(error):
        members_of_json(stepped(body)[0])


def test_what_is_parsed_at_once_has_a_bound() -> None:
    made, _ = stepped(array(b"{}", MOST_BYTES - 2 * PIECE_BYTES))
    assert len(made) < MOST_BYTES + PIECE_BYTES
    small = array(b"{}", WHOLE_BYTES - 100)
    assert stepped(small) == (small, 0)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=600)
    | st.lists(st.integers(-9, 10**9), max_size=60),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=20), inner, max_size=5),
    max_leaves=20,
)


def is_kept(value: Any) -> bool:
    """Whether the outline keeps a value for sure; a long string becomes an empty one, and a row of numbers one number."""
    return value is None or isinstance(value, bool) or (isinstance(value, str) and len(json.dumps(value)) < 60)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.text(max_size=20), VALUES, max_size=6),
    st.text(max_size=30),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.sampled_from([300, 301, 512, 4096]),
)
def test_an_outline_has_the_same_names_and_short_values(
    members: dict[str, Any], model: str, indent: int | None, plain: bool, piece: int
) -> None:
    document = members | {"model": model}
    body = json.dumps(document, indent=indent, ensure_ascii=plain).encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WHOLE_BYTES", 0)
        patch.setattr(module, "PIECE_BYTES", piece)
        try:
            made = asyncio.run(outline(body, asyncio.Lock()))
        except BadRequest:
            assert b"\xed" in body  # half a surrogate pair, which is no UTF-8
            return
    found = json.loads(made)
    assert list(found) == list(document)
    assert found["model"] == model
    assert {name: found[name] for name in document if is_kept(document[name])} == {
        name: value for name, value in document.items() if is_kept(value)
    }
    assert all(type(found[name]) is type(value) for name, value in document.items() if isinstance(value, (dict, list, str)))


async def test_a_large_body_reaches_the_engine_as_it_came(gateway: Running) -> None:
    for name in ("digits", "texts", "late"):
        assert (await gateway.post(CHAT, READ[name])).status == 200
        assert gateway.engine.heard[-1].body == READ[name]
    for name in ("objects", "models"):
        assert is_ours(await gateway.ask(post(CHAT, REFUSED[name][1])), 413)
