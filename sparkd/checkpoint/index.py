"""Owns model.safetensors.index.json: the file of each tensor. Never opens a file, never compares the index with the folder.

An index in the usual layout is split at its quotation marks. Any other index is parsed as JSON, which yields the message about a fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import compress, count, islice, pairwise
from operator import lt, ne
from typing import Any

from sparkd.checkpoint.foreign_file import apart, is_apart
from sparkd.checkpoint.header import loads, parsed_json, shown
from sparkd.checkpoint.tensors import any_twice
from sparkd.errors import CheckpointError

INDEX = "model.safetensors.index.json"
AGAIN = "Download the index again"
_OPENING = re.compile(rb'(?<=[{,\s])"weight_map"\s*:\s*\{')
_KEY = b'"weight_map"'
_SPACE = b" \t\r\n"
# Printable ASCII that a JSON string contains unescaped.
_PLAIN = bytes(code for code in range(0x20, 0x7F) if code not in b'"\\')
_CHUNK_BYTES = 1 << 20


def read_index(raw: bytes, path: str) -> dict[str, bytes]:
    """File -> names of its tensors, UTF-8 and joined by line feeds. raw: the index. Raises CheckpointError.

    A path that may lead outside of the folder is refused, so that an index cannot reach other files.
    """
    if is_apart(len(raw)):
        return apart(_read, raw, path)
    return _read(raw, path)


def _read(raw: bytes, path: str) -> dict[str, bytes]:
    names_of = _recognised(raw)
    return names_of if names_of is not None else _parsed(raw, path)


def _recognised(raw: bytes) -> dict[str, bytes] | None:
    opening = _OPENING.search(raw)
    if opening is None or b"\\" in raw:
        return None
    start, end = opening.end(), raw.find(b"}", opening.end())
    # The map, without its members, must be the value of this key in the whole object.
    around = raw[:start] + raw[end:]
    if end < 0 or around.count(_KEY) != 1:
        return None
    try:
        value = parsed_json(around, INDEX, AGAIN)
    except CheckpointError:
        return None
    if not isinstance(value, dict) or value.get("weight_map") != {}:
        return None
    pieces: dict[bytes, list[bytes]] = {}
    last, ascending = b"", True
    for chunk in _chunks(raw, start, end):
        members = _members(chunk)
        if members is None:
            return None
        names, files = members
        ascending = ascending and last < names[0] and all(map(lt, names, islice(names, 1, None)))
        last = names[-1]
        for first, after in pairwise([0, *compress(count(1), map(ne, files, islice(files, 1, None))), len(files)]):
            pieces.setdefault(files[first], []).append(b"\n".join(names[first:after]))
    names_of = {file.decode(): b"\n".join(names) for file, names in pieces.items()}
    if not all(map(_is_file_name, names_of)):
        return None
    # Most indexes are sorted, and a check of the order is cheaper than a search for repeated names.
    if not ascending and any_twice(name for joined in names_of.values() for name in joined.split(b"\n")):
        return None
    return names_of


def _chunks(raw: bytes, start: int, end: int) -> Iterator[bytes]:
    """raw[start:end] in pieces that end with a member, because 190,000 members at once would take 50 MB."""
    while (cut := raw.find(b'",', min(start + _CHUNK_BYTES, end), end)) >= 0:
        yield raw[start : cut + 1]
        start = cut + 2
    yield raw[start:end]


def _members(chunk: bytes) -> tuple[list[bytes], list[bytes]] | None:
    """(names, files) of a text `"name": "file", ..`; None for any other text. The strings have no escapes."""
    parts = chunk.split(b'"')
    if len(parts) < 5 or len(parts) % 4 != 1 or parts[0].strip(_SPACE) or parts[-1].strip(_SPACE):
        return None
    if any(between.strip(_SPACE) != b":" for between in set(parts[2::4])):
        return None
    if any(between.strip(_SPACE) != b"," for between in set(parts[4:-1:4])):
        return None
    names, files = parts[1::4], parts[3::4]
    if b"".join(names).translate(None, _PLAIN) or not all(names) or b"".join(set(files)).translate(None, _PLAIN):
        return None
    return names, files


def _parsed(raw: bytes, path: str) -> dict[str, bytes]:
    weight_map = _object(parsed_json(raw, path, AGAIN), path, AGAIN).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("it has no weight_map that names a tensor", file=path, cure=AGAIN)
    names_of: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_file_name(file):
            problem = f"its weight_map names {shown(file)}, which is not the name of a file in this folder"
            raise CheckpointError(problem, file=path, tensor=shown(name), cure=AGAIN)
        if not name.isprintable() or not name:
            problem = "its weight_map names a tensor whose name is empty or has control characters"
            raise CheckpointError(problem, file=path, tensor=shown(name), cure=AGAIN)
        names_of.setdefault(file, []).append(name)
    return {file: "\n".join(names).encode() for file, names in names_of.items()}


def _is_file_name(name: str) -> bool:
    return name.isprintable() and name not in ("", ".", "..") and "/" not in name


def object_of(raw: bytes, path: str, cure: str) -> dict[str, Any]:
    """The JSON object in a foreign file. Raises CheckpointError."""
    return _object(loads(raw, path, cure), path, cure)


def _object(value: Any, path: str, cure: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError("it holds no JSON object", file=path, cure=cure)
    return value
