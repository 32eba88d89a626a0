"""Every route of the admin API gets the worst bodies that its fields can hold: none holds the loop, for which `/livez` waits."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from sparkd.admin.bodies import MOST_MARKS
from sparkd.config.config import load_config, parse_model
from sparkd.config.yaml_file import MAX_DEPTH
from sparkd.errors import MOST_MESSAGE_CHARS, ConfigError
from sparkd.gateway.routes import ADMIN_ROOT
from sparkd.recipes.admin_policy import KEYS, MOST_ARGUMENTS, MOST_ENTRY_CHARACTERS
from tests.sparkd.admin.test_app import Admin, _plans_of_this_process, admin_of  # noqa: F401 - a fixture

# Just within what an entry may have.
SIZE = MOST_ENTRY_CHARACTERS - 4096
# The time of the loop's thread, in parses of 256 KiB of `{}`. A body took at most 6; one that cost more than its size took hundreds.
MOST_PARSES, PARSED = 20, b"[" + b",".join([b"{}"] * (256 * 1024 // 3)) + b"]"
ANCHORS = "\n".join(["a0: &a0 [x, x, x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, 40))])
TEXTS = [
    *(letter * SIZE for letter in ("x", " ", "-", "1", "/", "[", ",", ".", "'")),
    *(words * (SIZE // len(words)) for words in ("/a", "a-", "a=b ", "${env.A}", "\x1b[2J\u202e", "k: 1\n", "- [{")),
    ANCHORS,
    f"args: {{depth: &a [{', '.join(['1'] * 10_000)}], concurrency: *a, pp: *a, tg: *a}}",
]


def within() -> Iterator[bytes]:
    """Long, deep, many and alike: what the bounds let through."""
    yield from (json.dumps(text).encode() for text in TEXTS)
    yield b"[" * (MAX_DEPTH - 3) + b"]" * (MAX_DEPTH - 3)
    yield b'{"a":' * (MAX_DEPTH - 3) + b"0" + b"}" * (MAX_DEPTH - 3)
    yield from (worst for count in (MOST_ARGUMENTS, MOST_MARKS - 16) for worst in several(count))
    yield b"1" * SIZE
    yield json.dumps({"long_key_" * (SIZE // 9): 1}).encode()


def beyond() -> Iterator[bytes]:
    yield b"[" * 100_000 + b"]" * 100_000
    yield b'{"a":' * 100_000 + b"0" + b"}" * 100_000
    yield from several(100_000)


def several(count: int) -> Iterator[bytes]:
    yield b"[" + b",".join([b"1"] * count) + b"]"
    yield b"[" + b",".join([b"{}"] * (count // 3)) + b"]"
    yield json.dumps(["--seed=1"] * count).encode()
    yield json.dumps([f"word{number}" for number in range(count)]).encode()
    yield json.dumps({f"key{number}": number for number in range(count)}).encode()


WITHIN, BEYOND = list(within()), list(beyond())


def bodies(schema: Mapping[str, Any]) -> Iterator[bytes]:
    """Each value as the whole body, and in each of its fields beside the least that the others need."""
    yield from WITHIN + BEYOND
    least = {key: {"model": "/y"} if key == "spec" else "new" for key in schema.get("required", ())}
    for key in schema.get("properties", ()):
        yield from (body_with(least, key, value) for value in WITHIN + BEYOND)


def body_with(least: Mapping[str, Any], key: str, value: bytes) -> bytes:
    members = {name: json.dumps(one).encode() for name, one in least.items()} | {key: value}
    return b"{" + b",".join(b'"%s":%s' % (name.encode(), one) for name, one in members.items()) + b"}"


async def slow(made: Admin, asked: Iterable[tuple[str, str, bytes]]) -> list[tuple[str, str, bytes]]:
    """Those (method, path, body) that hold the loop: counted in CPU time of its thread, which neither other threads nor a busy machine
    change."""
    begun_s = time.thread_time()
    json.loads(PARSED)
    parse_s = time.thread_time() - begun_s

    async def parses(method: str, path: str, body: bytes) -> float:
        begun_s = time.thread_time()
        response = await made.client.request(method, path, content=body, headers={"content-type": "application/json"})
        assert response.status_code != 500, (method, path, body[:100])
        assert response.is_success or len(response.json()["error"]["message"]) < 2 * MOST_MESSAGE_CHARS
        return (time.thread_time() - begun_s) / parse_s

    # Twice, because the first request for something may import it.
    return [(*one[:2], one[2][:100]) for one in asked if await parses(*one) > MOST_PARSES and await parses(*one) > MOST_PARSES]


@pytest.mark.usefixtures("_plans_of_this_process")
async def test_no_body_costs_the_loop_more_than_its_size(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        made.scene.cluster.answers["stored"] = {}
        document = made.app.openapi()
        schemas = {
            (method, template): operation["requestBody"]["content"]["application/json"]["schema"]
            for template, operations in document["paths"].items()
            for method, operation in operations.items()
            if "requestBody" in operation
        }
        assert {("post", f"{ADMIN_ROOT}/models"), ("post", f"{ADMIN_ROOT}/bench"), ("post", f"{ADMIN_ROOT}/plan")} < schemas.keys()
        for (method, template), schema in schemas.items():
            named = document["components"]["schemas"].get(schema.get("$ref", "").rpartition("/")[2], schema)
            assert not await slow(made, ((method, re.sub(r"{\w+}", "new", template), body) for body in bodies(named)))
        assert (await made.client.get("/livez")).status_code == 200


@pytest.mark.parametrize("key", sorted(KEYS))
def test_twice_as_many_values_of_a_key_cost_no_more_than_twice(key: str) -> None:
    config = load_config(None, environ={})

    def judge(value: Any) -> None:
        with suppress(ConfigError):
            config.with_model(parse_model("new", {"model": "/y", key: value}, over_admin=True))

    def lines(value: Any) -> int:
        """The lines of Python that run, which depend on no machine."""
        judge(value)  # fills caches
        count = 0

        def trace(_frame: FrameType, event: str, _value: object) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            judge(value)
        finally:
            sys.settrace(before)
        return count

    for few, more, many in zip(*(map(json.loads, several(count)) for count in (32, 64, 128)), strict=True):
        assert lines(many) - lines(more) < 2.5 * (lines(more) - lines(few)) + 500


@pytest.mark.rest
async def test_no_key_of_an_entry_costs_the_loop_more_than_its_size(tmp_path: Path) -> None:
    """PUT judges as POST does, and what it has taken in does not stand in the way of the next."""
    async with admin_of(tmp_path) as made:
        entries = (body_with({"model": "/y"}, key, value) for key in sorted(KEYS) for value in WITHIN)
        assert not await slow(made, (("put", f"{ADMIN_ROOT}/models/new", body_with({}, "spec", entry)) for entry in entries))
