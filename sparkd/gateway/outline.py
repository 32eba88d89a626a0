"""Owns the outline of a large JSON body: the body without long strings and long rows of numbers. Never holds the loop for long.

A parser in C reads 60 MiB at once, and the rest of the daemon waits for it (0.5 to 0.9 s). So the outline is made in pieces, and the parser
gets the outline. The engine reads the whole body and refuses errors in the parts that the outline leaves out.
"""

from __future__ import annotations

import asyncio
import codecs
import re

from sparkd.errors import BadRequest, BodyTooLarge

# A smaller body is its own outline.
WHOLE_BYTES = 512 * 1024
# Takes at most 3 ms, of names and values.
PIECE_BYTES = 32 * 1024
MOST_BYTES = 4 * 1024 * 1024
# A longer string, or one with more escapes, names nothing.
_STRING = rb'"[^"\\]{0,256}+(?:\\.[^"\\]{0,256}+){0,64}+"'
# Python refuses to read longer integers (sys.set_int_max_str_digits), and so do engines, some of them with a traceback.
LONG_DIGITS = 4300

# The bytes of a row of numbers: an "e" belongs to one only as an exponent.
_EXPONENT = rb"(?<=[0-9.])[eE](?=[-+0-9])"
_NUMBERS = rb"(?:[-+.,0-9 \t\r\n]|" + _EXPONENT + rb")"
_ROW = re.compile(rb"(?:[-+.,0-9 \t\r\n]++|" + _EXPONENT + rb")++")
_KEPT = re.compile(rb'(?:[^"\-+.,0-9 \t\r\n]++|' + _NUMBERS + rb"{1,63}+(?!" + _NUMBERS + rb")|" + _STRING + rb")++", re.DOTALL)
# A string between "," or "[" and "," or "]" is an element of a list: a name is followed by ":", its value comes behind one. The second part
# takes every other string whole, so that no closing quote is taken for an opening one.
_CONTENT = _STRING[1:-1]
_ELEMENT = re.compile(rb'(?<=[,\[])([ \t\r\n]?")' + _CONTENT + rb'(")(?=[ \t\r\n]?[,\]])|(' + _STRING + rb")", re.DOTALL)
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)++', re.DOTALL)
_DIGITS_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_NUMBER = b"0" * LONG_DIGITS
# The cost of a step besides its bytes, in bytes.
_STEP_BYTES = 512
_SPACE = b" \t\r\n"


class _Turn:
    """Gives the loop back after every piece, and waits for the others that hold `turns`: one piece a turn of the loop, of all bodies."""

    def __init__(self, turns: asyncio.Lock) -> None:
        self._turns = turns
        self._bytes = 0

    async def took(self, size: int) -> None:
        self._bytes += size + _STEP_BYTES
        if self._bytes >= PIECE_BYTES:
            self._bytes = 0
            async with self._turns:
                await asyncio.sleep(0)


async def outline(body: bytes | bytearray, turns: asyncio.Lock) -> bytes | bytearray:
    """A document with the same names and short values in the same places; strings in lists may be empty in it. turns: of all bodies.

    Raises BodyTooLarge where the body consists mostly of names and values, and BadRequest for bytes that are not UTF-8 and for numbers
    that no parser accepts.
    """
    begin = len(codecs.BOM_UTF8) if body.startswith(codecs.BOM_UTF8) else 0  # which msgspec refuses and the engine takes
    if len(body) <= WHOLE_BYTES:
        return body[begin:] if begin else body
    turn = _Turn(turns)
    if not body.isascii():
        await _check_utf8(body, turn)
    result, at = bytearray(), begin
    while at < len(body):
        match = _KEPT.match(body, at, at + PIECE_BYTES)
        if match is not None:
            result += _ELEMENT.sub(rb"\1\2\3", match[0])
            at = match.end()
            await turn.took(len(match[0]))
        elif body[at] == ord('"'):
            at = await _skip_string(body, at + 1, turn)
            # A string without an end stays without one: the parser reports it.
            result += b'""' if at <= len(body) else b'"'
        else:
            at = await _skip_row(body, at, result, turn)
        if len(result) > MOST_BYTES:
            raise BodyTooLarge(f"The body has more than {MOST_BYTES} bytes beside long strings and rows of numbers. Send it in parts.")
    return result


async def _skip_string(body: bytes | bytearray, at: int, turn: _Turn) -> int:
    """Where what follows a string's closing quote begins; beyond the body's end where there is none."""
    while (match := _IN_STRING.match(body, at, at + PIECE_BYTES)) is not None:
        await turn.took(match.end() - at)
        at = match.end()
    return at + 1 if body[at : at + 1] == b'"' else len(body) + 1


async def _skip_row(body: bytes | bytearray, begin: int, result: bytearray, turn: _Turn) -> int:
    """Puts one number in the place of a row of them, between the commas that it begins and ends with."""
    at, first, last = begin, b"", b""
    while (match := _ROW.match(body, at, at + PIECE_BYTES)) is not None:
        if _LONG_NUMBER in body[max(begin, at - LONG_DIGITS) : match.end()].translate(_DIGITS_AS_ZEROS):
            raise BadRequest(f"The body holds a number of {LONG_DIGITS} digits or more; send it as a string.")
        row = match[0].strip(_SPACE)
        first, last = first or bytes(row[:1]), bytes(row[-1:]) or last
        at = match.end()
        await turn.took(len(match[0]))
    if not first:
        result += b" "
    elif first == last == b"," and _is_lone_comma(body, begin, at):
        result += b","
    else:
        result += (b"," if first == b"," else b"") + b"0" + (b"," if last == b"," else b"")
    return at


def _is_lone_comma(body: bytes | bytearray, begin: int, end: int) -> bool:
    """Whether a row is one comma among spaces. The first and the last comma of a row are the same one."""
    return body.find(b",", begin, end) == body.rfind(b",", begin, end)


async def _check_utf8(body: bytes | bytearray, turn: _Turn) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with memoryview(body) as view:
            for at in range(0, len(view), PIECE_BYTES):
                decoder.decode(view[at : at + PIECE_BYTES], at + PIECE_BYTES >= len(view))
                await turn.took(PIECE_BYTES)
    except UnicodeDecodeError as error:
        raise BadRequest(f"The body is not valid UTF-8: {error.reason}. Send JSON in UTF-8.") from None
