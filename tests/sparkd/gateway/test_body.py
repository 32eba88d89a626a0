"""Which model a body names: S1 of the malformed bodies as a table, the same over hypothesis' JSON, and the form."""

from __future__ import annotations

import codecs
import json
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.errors import BadRequest
from sparkd.gateway.body import Members, members_of_json, model_of_form
from tests.sparkd.gateway.fakes import Running

DIGITS = b"9" * 5000
DEEP = b"[" * 100_000 + b"]" * 100_000

GOOD = {
    "plain": (b'{"model":"a","stream":true}', "a"),
    "last member": (b'{"messages":[],"model":"a"}', "a"),
    "spaces": (b' \r\n\t{ "model" : "a" } \n', "a"),
    "escaped name": (b'{"mod\\u0065l":"a"}', "a"),
    "escaped value": (b'{"model":"caf\\u00e9/\\"x\\""}', 'caf\u00e9/"x"'),
    "utf-8 value": ('{"model":"caf\u00e9"}'.encode(), "caf\u00e9"),
    "model further down": (b'{"model":"a","tools":[{"model":"b","x":{"model":1}}]}', "a"),
    "model in a text": (b'{"model":"a","x":"\\"model\\":\\"b\\""}', "a"),
    "digits in a string": (b'{"model":"a","x":"' + DIGITS + b'"}', "a"),
    "empty model": (b'{"model":""}', ""),
    "model twice": (b'{"model":"c","m\\u006fdel":"b","model":"a"}', "a"),
    "byte order mark": (codecs.BOM_UTF8 + b'{"model":"a"}', "a"),
    "large": (b'{"model":"a","x":"' + b"y" * 1_000_000 + b'"}', "a"),
    "large, not ASCII": (('{"model":"a","x":"' + "\u00e9" * 1_000_000 + '"}').encode(), "a"),
}

BAD = {
    "empty": b"",
    "cut off": b'{"model":"a"',
    "invalid UTF-8 in a text": b'{"model":"a","x":"\xff\xfe"}',
    "invalid UTF-8 in the model": b'{"model":"\xff"}',
    "invalid UTF-8 in a name": b'{"model":"a","\xff":1}',
    "surrogate in UTF-8": b'{"model":"a","x":"\xed\xa0\x80"}',
    "large, invalid UTF-8 at a seam": b'{"model":"a","x":"' + b"y" * (1024 * 1024 - 19) + b"\xc3" + b'y"}' + b" " * 1024 * 1024,
    "NaN": b'{"model":"a","temperature":NaN}',
    "Infinity": b'{"model":"a","temperature":[-Infinity]}',
    "100k deep": b'{"model":"a","x":' + DEEP + b"}",
    "100k deep objects": b'{"model":"a","x":' + b'{"x":' * 100_000 + b"1" + b"}" * 100_001,
    "lone surrogate": b'{"model":"a","x":"\\ud800"}',
    "lone surrogate in the model": b'{"model":"\\ud800"}',
    "raw NUL": b'{"model":"a","x":"\x00"}',
    "control character": b'{"model":"a","x":"a\x01b"}',
    "list root": b'[{"model":"a"}]',
    "bytes behind the document": b'{"model":"a"}x',
    "number model": b'{"model":7}',
    "bad escape": b'{"model":"a","x":"\\q"}',
}


@pytest.mark.parametrize("case", GOOD)
def test_reads_the_model(case: str) -> None:
    body, model = GOOD[case]
    assert members_of_json(body).model == model
    assert members_of_json(bytearray(body)).model == model


@pytest.mark.parametrize("case", BAD)
def test_refuses(case: str) -> None:
    for body in (BAD[case], bytearray(BAD[case])):
        with pytest.raises(BadRequest) as caught:
            members_of_json(body)
        assert len(caught.value.message) < 200


def test_a_body_may_name_no_model() -> None:
    for body in (b'{"messages":[]}', b'{"model":null}', b"{}"):
        assert members_of_json(body).model is None
    for form_body in (form((FILE, b"x")), b"--XX--\r\n"):
        assert model_of_form(form_body, TYPE) is None


@pytest.mark.parametrize(
    ("body", "members"),
    [
        (b'{"stream":true,"store": true }', Members(stream=True, store=True)),
        (b'{"str\\u0065am":true}', Members(stream=True)),
        (b'{"stream":false,"store":null}', Members()),
        (b'{"stream":"true","store":1}', Members()),
        (b'{"stream":[true],"store":{"store":true}}', Members()),
        (b'{"input":"\\"stream\\":true","x":{"stream":true,"tools":[{}]}}', Members()),
        (b'{"stream":true,"stream":false}', Members()),
        (b'{"tools":[{"type":"function"}]}', Members(functions=True)),
        (b'{"tool_choice":"auto","tools":[{"type":"web_search"},{"name":"look"}]}', Members(functions=True)),
        (b'{"tools":[{"type":"custom"}],"tool_choice":{"type":"tool","name":"look"}}', Members(functions=True)),
        (b'{"tools":[{"type":"web_search"}]}', Members()),
        (b'{"tools":[{"type":"function"}],"tool_choice":"none"}', Members()),
        (b'{"tools":[{"type":"function"}],"tool_choice":{"type":"none"}}', Members()),
        (b'{"tools":[],"tool_choice":"auto"}', Members()),
        (b'{"tools":null}', Members()),
        (b'{"tools":"look"}', Members()),
        (b'{"tools":[{"type":"function"}],"tool_choice":7}', Members()),
    ],
)
def test_what_else_is_read_is_said_in_so_many_words(body: bytes, members: Members) -> None:
    assert members_of_json(body) == members == members_of_json(bytearray(body))


def test_a_refusal_repeats_nothing_of_the_body() -> None:
    for body in (b'{"model":"a","x":"canary\xff"}', b'{"model":["canary"]}', b'{"model":"a" canary}', b'"canary"'):
        with pytest.raises(BadRequest) as caught:
            members_of_json(body)
        assert "canary" not in caught.value.message
        assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a","x":[' + b"[]," * 1_000_000 + b"0]}",
        b'{"model":[' + b"[]," * 1_000_000 + b"0]}",
        b'{"model":"a","stream":[' + b"[]," * 1_000_000 + b"0]}",
    ],
)
def test_what_is_skipped_costs_no_memory(body: bytes) -> None:
    tracemalloc.start()
    try:
        with suppress(BadRequest):
            members_of_json(body)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(), _ANYTHING), st.text(), st.booleans())
def test_reads_what_json_writes(members: dict[str, object], model: str, ascii_only: bool) -> None:
    members["model"] = model
    try:
        body = json.dumps(members, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return
    try:
        json.dumps(members, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a lone surrogate, escaped
        with pytest.raises(BadRequest):
            members_of_json(body)
        return
    assert members_of_json(body).model == model


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_break_it(noise: bytes) -> None:
    for body in (noise, b'{"model":"a","x":' + noise + b"}", b'{"model":"' + noise + b'"}'):
        try:
            assert isinstance(members_of_json(body).model, str | None)
        except BadRequest:
            pass


def form(*parts: tuple[str, bytes], boundary: str = "XX", end: bytes = b"--\r\n") -> bytes:
    pieces = [f"--{boundary}\r\n{head}\r\n\r\n".encode() + value + b"\r\n" for head, value in parts]
    return b"".join(pieces) + b"--" + boundary.encode() + end


FIELD = 'Content-Disposition: form-data; name="model"'
FILE = 'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav'
TYPE = "multipart/form-data; boundary=XX"

GOOD_FORMS = {
    "plain": (form((FIELD, b"tiny")), TYPE),
    "behind a file": (form((FILE, b"\x00\r\n--X\r\n" * 1000), (FIELD, b"tiny")), TYPE),
    "a file that shows a field": (form((FILE, b'name="model"\r\n\r\nother'), (FIELD, b"tiny")), TYPE),
    "a file called model": (form(('Content-Disposition: form-data; name="file"; filename="model"', b"x"), (FIELD, b"tiny")), TYPE),
    "unquoted": (form(("content-disposition:form-data;name=model", b"tiny")), TYPE),
    "quoted boundary": (form((FIELD, b"tiny"), boundary="a b"), 'multipart/form-data; charset=utf-8; boundary="a b"'),
    "an empty preamble": (b"\r\n" + form((FIELD, b"tiny")), TYPE),
    "no newline at the end": (form((FIELD, b"tiny"), end=b"--"), TYPE),
}
BAD_FORMS = {
    "empty": (b"", TYPE),
    "no boundary": (form((FIELD, b"tiny")), "multipart/form-data"),
    "long boundary": (form((FIELD, b"tiny"), boundary="X" * 71), "multipart/form-data; boundary=" + "X" * 71),
    "model twice": (form((FIELD, b"tiny"), (FIELD, b"other")), TYPE),
    "cut off": (form((FIELD, b"tiny"))[:-10], TYPE),
    "preamble": (b"hello\r\n" + form((FIELD, b"tiny")), TYPE),
    "9 KiB of headers": (form((FIELD + "\r\nx: " + "y" * 9000, b"tiny")), TYPE),
    "65 parts": (form(*[(FILE, b"")] * 65, (FIELD, b"tiny")), TYPE),
    "invalid UTF-8": (form((FIELD, b"\xff")), TYPE),
}


@pytest.mark.parametrize("case", GOOD_FORMS)
def test_reads_the_model_of_a_form(case: str) -> None:
    body, content_type = GOOD_FORMS[case]
    assert model_of_form(bytearray(body), content_type) == "tiny"


@pytest.mark.parametrize("case", BAD_FORMS)
def test_refuses_a_form(case: str) -> None:
    body, content_type = BAD_FORMS[case]
    with pytest.raises(BadRequest):
        model_of_form(body, content_type)


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_break_the_form(noise: bytes) -> None:
    for body in (noise, b"--XX" + noise, form((FIELD, noise))):
        try:
            assert isinstance(model_of_form(body, TYPE), str | None)
        except BadRequest:
            pass


async def test_the_place_of_a_fault_is_told(gateway: Running) -> None:
    body = b'{"model":"tiny","x":"yyy",}'
    assert f"(byte {len(body) - 1})" in (await gateway.post("/v1/chat/completions", body)).error["message"]


@pytest.mark.parametrize("padding_bytes", [0, 2 << 20], ids=["small", "large"])
async def test_a_byte_order_mark_is_served_as_the_engine_serves_it(gateway: Running, padding_bytes: int) -> None:
    body = codecs.BOM_UTF8 + b'{"model":"tiny","x":"' + b"y" * padding_bytes + b'"}'
    assert (await gateway.post("/v1/chat/completions", body)).status == 200
    assert gateway.engine.heard[0].body == body
