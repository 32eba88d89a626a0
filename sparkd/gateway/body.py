"""Reads the few members of a request body that the gateway needs: model, stream, tools, store."""

from __future__ import annotations

import codecs
import re
import zlib

import msgspec
import zstandard

from sparkd.errors import BadRequest, BodyTooLarge
from sparkd.gateway.limits import too_large

# The parser holds the loop: for a body of 32 MiB 10 ms of base64, 75 ms of the worst (500,000 times `"tools":"",`, then a name of escapes),
# and 28 ms more for its tools. Without MOST_MEMBERS `"store":1,` alone would take 110 to 240 ms.
LARGE_BYTES = 1024 * 1024
MOST_MEMBERS = 500_000
_PIECE_BYTES = 1024 * 1024
_MAX_PARTS = 64
# RFC 9659 asks of a decoder of zstd a window of 8 MiB.
_ZSTD_WINDOW_BYTES = 8 * 1024 * 1024
# 15 bits of window, 16 for gzip's header (zlib.h, inflateInit2).
_GZIP_BITS = 31
ENCODINGS = (b"gzip", b"zstd")
_MAX_PART_HEADER_BYTES = 8 * 1024

# Anthropic's tools have no type, or `custom`.
_FUNCTIONS = (None, "function", "custom")
_ABSENT, _TRUE = msgspec.Raw(b""), msgspec.Raw(b"true")
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"\\]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_FIELD_NAME = re.compile(rb';[ \t]*name=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))', re.IGNORECASE)


class _Typed(msgspec.Struct):
    """A tool, or a choice of one."""

    type: str | None = None


class _Read(msgspec.Struct):
    """The values that one pass over a body finds; all but `model` as their bytes."""

    model: str | None = None
    stream: msgspec.Raw = _ABSENT
    store: msgspec.Raw = _ABSENT
    tools: msgspec.Raw = _ABSENT
    tool_choice: msgspec.Raw = _ABSENT


class Members(msgspec.Struct, frozen=True):
    """The members of a JSON body.

    model: None if it is missing or null.
    stream, store: whether it is `true`; the engine refuses a value of another kind.
    functions: whether the model is offered functions, of OpenAI's or Anthropic's APIs. The engine refuses tools of other types, which are
        built into a server.
    """

    model: str | None = None
    stream: bool = False
    store: bool = False
    functions: bool = False


def members_of_json(body: bytes | bytearray) -> Members:
    """The members of a JSON object. Raises BadRequest unless the body is exactly one JSON document.

    The last of two members of one name counts, as with Python's json in the engine. msgspec checks what it skips without building it, so
    a hostile body of n bytes takes no memory: pydantic and orjson built 16 MB of `[0,0,..` into 240 MiB. It accepts bytes that are not
    UTF-8 in skipped strings; `_check_utf8` refuses them.
    """
    if body.startswith(codecs.BOM_UTF8):  # as PowerShell writes files; the engine takes it
        body = body[len(codecs.BOM_UTF8) :]
    try:
        read = _READ.decode(body)
        if not body.isascii():
            _check_utf8(body)
    except msgspec.ValidationError as error:
        raise BadRequest(f"The body cannot be used: {_plain(error)}.", param="model") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {_plain(error)}.") from None
    except UnicodeDecodeError as error:
        raise BadRequest(f"The body is not valid UTF-8: {error.reason}. Send JSON in UTF-8.") from None
    except RecursionError:
        raise BadRequest("The body is not usable JSON: it is nested too deeply.") from None
    return Members(read.model, read.stream == _TRUE, read.store == _TRUE, bool(read.tools) and _has_functions(read))


def refuse_many_members(body: bytes | bytearray) -> None:
    """Keeps hostile clients from holding the loop: lists in lists, and known members that repeat, take the parser the longest.

    Brackets and colons are counted, those of texts too. Raises BodyTooLarge.
    """
    if body.count(b"[") + body.count(b"{") + body.count(b":") > MOST_MEMBERS:
        raise BodyTooLarge(f"The body has more than {MOST_MEMBERS} lists, objects and members ('[', '{{' and ':'). Send it in parts.")


def unpacked(body: bytes, encoding: bytes, limit: int) -> bytes:
    """The body without its content-encoding, gzip or zstd. Raises BodyTooLarge above `limit` bytes, BadRequest where it is damaged."""
    try:
        if encoding == b"gzip":
            plain = _gunzipped(body, limit)
        else:
            plain = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).stream_reader(body).read(limit + 1)
    except (EOFError, zlib.error, zstandard.ZstdError):
        raise BadRequest(f"The body is not valid {encoding.decode()}, which its content-encoding says; send it as it is.") from None
    if len(plain) > limit:
        raise BodyTooLarge(too_large(limit, " without its content-encoding"))
    return plain


def _gunzipped(body: bytes, limit: int) -> bytes:
    """The one member of a gzip file (RFC 1952), or its first `limit` + 1 bytes. Millions of empty members would take Python seconds."""
    decoder = zlib.decompressobj(_GZIP_BITS)
    plain = decoder.decompress(body, limit + 1)
    if len(plain) <= limit:
        if not decoder.eof:
            raise EOFError
        if decoder.unused_data:
            raise BadRequest("The gzip body goes on after its first member; pack it as one.")
    return plain


def model_of_form(body: bytes | bytearray, content_type: str) -> str | None:
    """The `model` field of a multipart/form-data body (RFC 7578), or None. Raises BadRequest if there are several."""
    match = _BOUNDARY.search(content_type)
    if match is None:
        raise BadRequest("The content type has no usable boundary; send multipart/form-data with one of 1 to 70 characters.")
    delimiter = b"--" + (match[1] or match[2]).encode("latin-1")
    begin = 2 if body.startswith(b"\r\n") else 0  # RFC 2046 5.1.1: an empty preamble, which some clients send
    if not body.startswith(delimiter, begin):
        raise BadRequest("The multipart body does not begin with its boundary.")
    names: list[bytes] = []
    at, marker = begin + len(delimiter), b"\r\n" + delimiter
    for _ in range(_MAX_PARTS):
        if body[at : at + 2] == b"--":
            return _only(names)
        end = body.find(marker, at)
        if body[at : at + 2] != b"\r\n" or end < 0:
            raise BadRequest("The multipart body is malformed or incomplete.")
        name, value_at = _field(body, at + 2, end)
        if name == b"model":
            names.append(bytes(body[value_at : min(end, value_at + 1024)]))
        at = end + len(marker)
    raise BadRequest(f"The multipart body has more than {_MAX_PARTS} parts.")


def _has_functions(read: _Read) -> bool:
    if len(memoryview(read.tools)) > LARGE_BYTES:
        return False  # a hostile client's: an object is built for each
    try:
        tools = _TOOLS.decode(read.tools)
        choice = _CHOICE.decode(read.tool_choice) if read.tool_choice else None
    except (msgspec.DecodeError, RecursionError):
        return False  # for instance, `tools` is a string: the engine refuses it
    kind = choice.type if isinstance(choice, _Typed) else choice
    return kind != "none" and any(tool.type in _FUNCTIONS for tool in tools or ())


_READ = msgspec.json.Decoder(_Read)
_TOOLS = msgspec.json.Decoder(list[_Typed] | None)
_CHOICE = msgspec.json.Decoder(str | _Typed | None)


def _check_utf8(body: bytes | bytearray) -> None:
    """Decode in pieces, because decoding 32 MiB with one wide character in it would take 128 MiB."""
    if len(body) <= _PIECE_BYTES:
        body.decode()
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    with memoryview(body) as view:
        for at in range(0, len(view), _PIECE_BYTES):
            decoder.decode(view[at : at + _PIECE_BYTES])
    decoder.decode(b"", True)


def _field(body: bytes | bytearray, start: int, end: int) -> tuple[bytes, int]:
    """The field name of the part in body[start:end] (b"" if it has none) and the offset of its value."""
    head_end = body.find(b"\r\n\r\n", start, min(end, start + _MAX_PART_HEADER_BYTES))
    if head_end < 0:
        raise BadRequest("A part of the multipart body has no headers, or more than 8 KiB of them.")
    for line in bytes(body[start:head_end]).split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.strip().lower() == b"content-disposition":
            match = _FIELD_NAME.search(value)
            return (match[1] if match[1] is not None else match[2]) if match else b"", head_end + 4
    return b"", head_end + 4


def _only(names: list[bytes]) -> str | None:
    if not names:
        return None
    if len(names) > 1:
        raise BadRequest("The form names `model` more than once; send it once.", param="model")
    try:
        return names[0].decode()
    except UnicodeDecodeError:
        raise BadRequest("The form field `model` is not valid UTF-8.", param="model") from None


def _plain(error: msgspec.MsgspecError) -> str:
    """msgspec's message without its prefix. It names types, members and positions, never the text of a value."""
    return str(error).removeprefix("JSON is malformed: ").rstrip(".")
