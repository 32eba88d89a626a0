"""Owns one safetensors file's header: its content, checked against the file. Never reads a weight, never imports numpy or torch.

The format: github.com/huggingface/safetensors, README.md, "Format"; the checks are those of its Rust reader (`Metadata::validate`).
msgspec decodes a faultless header. Any other header is parsed entry by entry, which takes four times as long and yields the message about
the fault. Both ways give the same tensors.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from operator import attrgetter, ne
from typing import Any

from sparkd.checkpoint.foreign_file import apart, is_apart
from sparkd.checkpoint.tensors import FileTensors, TensorKind, TensorRef
from sparkd.errors import CheckpointError, CheckpointIncomplete, CheckpointUnread

# Some 250,000 tensors in one file, more than in any published one. The reference reader accepts 100 MB (tensor.rs, MAX_HEADER_SIZE).
MAX_HEADER_BYTES = 32 << 20
# The limit for JSON files other than headers and indexes: settings for each of 40,000 experts have 3 MB and 200,000 values.
MAX_VALUES = 500_000
# Up to this size a faultless header is decoded in this process, at 50 MB/s.
QUICK_BYTES = 2 << 20
MAX_DIMENSIONS = 64
# The largest count of a 64-bit reader; it also bounds a product of hostile sizes.
MAX_COUNT = 2**63 - 1
PREFIX_BYTES = 8
# Bits of one element (safetensors/src/tensor.rs, Dtype::bitsize).
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
AGAIN = "Download the file again"
_SHOWN = 120
_BEGIN = b'{"__metadata__":'
# The end of the metadata and the first entry after them.
_FIRST = re.compile(rb'\},\s*"[^"\\]*"\s*:\s*\{\s*"dtype"\s*:')
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class Shard:
    """One file's identity. header_bytes: size of the JSON with its 8-byte length, after which the data begins; header_sha256: their
    digest."""

    path: str
    size_bytes: int
    mtime_ns: int
    header_bytes: int
    header_sha256: str


def read_header(path: str) -> tuple[Shard, FileTensors]:
    """One file's identity and its tensors in the order of their offsets. path: absolute. Raises CheckpointError.

    Reads the header only. The file's real size bounds the memory, whatever the length field claims.
    """
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            length = header_length(file.read(PREFIX_BYTES), path, status.st_size)
            header = _header_bytes(file, path, length)
    except OSError as error:
        raise CheckpointUnread(f"it cannot be read: {error.strerror}", file=path, cure="Check the disk") from None
    return parse_header(header, path, status.st_size, status.st_mtime_ns)


def header_length(prefix: bytes, path: str, size_bytes: int) -> int:
    """Bytes of the JSON. prefix: the first 8 bytes of the file, fewer if it is shorter; size_bytes: the file's. Raises CheckpointError."""
    if len(prefix) < PREFIX_BYTES:
        raise CheckpointError(f"the file ends after {len(prefix)} bytes, before the length of its header", file=path, cure=AGAIN)
    if prefix.startswith(b"version "):
        raise CheckpointError("it is a Git LFS pointer, not the file itself", file=path, cure="Run `git lfs pull` in its folder")
    length = int.from_bytes(prefix, "little")
    if length > size_bytes - PREFIX_BYTES:
        problem = f"its first bytes give the header {length} bytes, and the file has {size_bytes}"
        raise CheckpointError(f"{problem}: it is cut off, or not a safetensors file", file=path, cure=AGAIN)
    if length > MAX_HEADER_BYTES:
        problem = f"its first bytes give the header {length} bytes, more than the limit of {MAX_HEADER_BYTES}"
        raise CheckpointError(problem, file=path, cure="Store the model in more than one file")
    return length


def parse_header(header: bytes, path: str, size_bytes: int, mtime_ns: int) -> tuple[Shard, FileTensors]:
    """Parse a header and check it against the file's size. header: the JSON without its length. Raises CheckpointError."""
    begin = PREFIX_BYTES + len(header)
    data_bytes = size_bytes - begin
    tensors = _recognised(header, path, data_bytes) if len(header) <= QUICK_BYTES or not is_apart(len(header)) else None
    if tensors is None:
        tensors = apart(_parsed, header, path, data_bytes) if is_apart(len(header)) else _taken_apart(header, path, data_bytes)
    digest = hashlib.sha256(len(header).to_bytes(PREFIX_BYTES, "little") + header).hexdigest()
    return Shard(path, size_bytes, mtime_ns, begin, digest), tensors


def _parsed(header: bytes, path: str, data_bytes: int) -> FileTensors:
    tensors = _recognised(header, path, data_bytes)
    return tensors if tensors is not None else _taken_apart(header, path, data_bytes)


def open_regular(path: str) -> io.FileIO:
    """Open a file, unbuffered. Raises CheckpointError where it is missing, is no regular file or cannot be opened."""
    try:
        # A FIFO or a device must neither block the start nor be read.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError("it is not a regular file", file=path, cure="Put the checkpoint's own files there")
        return io.FileIO(path)
    except FileNotFoundError:
        linked = os.path.islink(path)
        reason = f"the file it links to, {os.readlink(path)}, is not there" if linked else "the file is not there"
        raise CheckpointIncomplete(reason, file=path, cure=AGAIN) from None
    except OSError as error:
        raise CheckpointUnread(f"it cannot be opened: {error.strerror}", file=path, cure="Check its owner and mode") from None


class _NoJson(ValueError):
    """A fault of JSON that Python's parser accepts."""


def loads(raw: bytes, path: str, cure: str = AGAIN) -> Any:
    """Parse a foreign file's JSON of at most MAX_VALUES values. Raises CheckpointError like parsed_json, and for more values."""
    return apart(_counted, raw, path, cure) if is_apart(len(raw)) else _counted(raw, path, cure)


def _counted(raw: bytes, path: str, cure: str) -> Any:
    value = parsed_json(raw, path, cure)
    level, count = [value], 0
    while level:
        count += len(level)
        if count > MAX_VALUES:
            raise CheckpointError(f"the JSON in it has more than {MAX_VALUES} values", file=path, cure=cure)
        level = [inner for each in level if isinstance(each, dict | list) for inner in (each.values() if isinstance(each, dict) else each)]
    return value


def parsed_json(raw: bytes, path: str, cure: str, *, strict: bool = False) -> Any:
    """Parse JSON with any number of values, in this process. Raises CheckpointError for text that is not UTF-8, not JSON, or nested too
    deeply.

    strict: refuse a repeated key, NaN, Infinity and -Infinity. Python, transformers and vLLM accept them, and published files contain them;
    the Rust reader of safetensors headers does not accept them.
    """
    hooks: dict[str, Any] = {"object_pairs_hook": _object, "parse_constant": _constant} if strict else {}
    try:
        return json.loads(raw.decode(), **hooks)
    except UnicodeDecodeError as error:
        reason = f"it is not UTF-8 at byte {error.start}"
    except RecursionError:
        reason = "it is nested too deeply"
    except (json.JSONDecodeError, _NoJson) as error:
        reason = str(error)
    except ValueError:
        # Python reads no number of more than 4300 digits (sys.set_int_max_str_digits).
        reason = "a number in it is too long"
    raise CheckpointError(f"the JSON in it cannot be read: {reason}", file=path, cure=cure)


def shown(name: object) -> str:
    """A name from a foreign file, short enough and printable for a message."""
    text = str(name) if isinstance(name, str) and name.isprintable() and name else ascii(name)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _header_bytes(file: io.FileIO, path: str, length: int) -> bytes:
    header = bytearray()
    while len(header) < length:
        piece = file.read(length - len(header))
        if not piece:
            raise CheckpointError(f"the file ended at byte {PREFIX_BYTES + len(header)} while its header was read", file=path, cure=AGAIN)
        header += piece
    return bytes(header)


def _recognised(header: bytes, path: str, data_bytes: int) -> FileTensors | None:
    """The tensors of a faultless header with the metadata first and the entries in the order of their data; None for any other header."""
    decode = _decoder()
    rest = _behind_metadata(header)
    if decode is None or rest is None or b"\\" in rest:
        return None
    try:
        table = decode(rest)
        kinds = tuple(_kind_of(entry.dtype, entry.shape) for entry in table.values())
    except (ValueError, CheckpointError):
        return None
    # An entry has ten quotation marks: more of them mean a repeated entry or a part of one.
    if rest.count(b'"') != 10 * len(table) or "" in table or _METADATA in table or not "".join(table).isprintable():
        return None
    bounds = list(accumulate(map(attrgetter("nbytes"), kinds), initial=0))
    if bounds[-1] != data_bytes or any(map(ne, map(attrgetter("data_offsets"), table.values()), pairwise(bounds))):
        return None
    return FileTensors(path, PREFIX_BYTES + len(header), "\n".join(table).encode(), kinds)


def _behind_metadata(header: bytes) -> bytes | None:
    """The header without its leading metadata; None where the metadata do not have the format's form."""
    if not header.startswith(_BEGIN):
        return header
    first = _FIRST.search(header)
    if first is None:
        return None
    try:
        value = json.loads(header[len(_BEGIN) : first.start() + 1].decode(), object_pairs_hook=_object, parse_constant=_constant)
    except (ValueError, RecursionError):
        return None
    return b"{" + header[first.start() + 2 :] if isinstance(value, dict) else None


@cache
def _decoder() -> Callable[[bytes], Any] | None:
    """A decoder of a header without metadata: name -> entry; it raises ValueError. None without msgspec, which an agent lacks."""
    try:
        import msgspec
    except ImportError:
        return None

    class Entry(msgspec.Struct, gc=False, forbid_unknown_fields=True):
        dtype: str
        shape: tuple[int, ...]
        data_offsets: tuple[int, int]

    return msgspec.json.Decoder(dict[str, Entry]).decode


@lru_cache(maxsize=4096)
def _kind_of(dtype: str, shape: tuple[int, ...]) -> TensorKind:
    """The kind of a tensor with this dtype and shape. Raises CheckpointError or ValueError."""
    bits = _bits(dtype, list(shape), "", "")
    if bits % 8:
        raise ValueError
    return TensorKind(dtype, shape, bits // 8)


def _taken_apart(header: bytes, path: str, data_bytes: int) -> FileTensors:
    table = parsed_json(header, path, AGAIN, strict=True)
    if not isinstance(table, dict):
        raise CheckpointError(f"the header is a JSON {_json_kind(table)} where an object is expected", file=path, cure=AGAIN)
    metadata = table.pop(_METADATA, None)
    if metadata is not None and not isinstance(metadata, dict):
        problem = f"{_METADATA} in the header is a {_json_kind(metadata)} where an object is expected"
        raise CheckpointError(problem, file=path, cure=AGAIN)
    begin = PREFIX_BYTES + len(header)
    tensors = [_tensor(name, entry, path, begin) for name, entry in table.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    _check_cover(tensors, path, begin, data_bytes)
    shared: dict[TensorKind, TensorKind] = {}
    kinds = (TensorKind(tensor.dtype, tensor.shape, tensor.nbytes) for tensor in tensors)
    return FileTensors(
        path, begin, "\n".join(tensor.name for tensor in tensors).encode(), tuple(shared.setdefault(kind, kind) for kind in kinds)
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _NoJson(f"the key {shown(twice)} stands twice in one object")
    return mapping


def _constant(name: str) -> Any:
    raise _NoJson(f"{name} is no JSON")


def _json_kind(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _tensor(name: str, entry: Any, path: str, begin: int) -> TensorRef:
    """One entry of the header, checked by itself."""
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        problem = "its entry in the header is not {dtype, shape, data_offsets: [begin, end]}"
        raise CheckpointError(problem, file=path, tensor=shown(name), cure=AGAIN) from None
    if not name.isprintable() or not name:
        raise CheckpointError("a tensor's name is empty or has control characters", file=path, tensor=shown(name), cure=AGAIN)
    if type(start) is not int or type(end) is not int or not 0 <= start <= end <= MAX_COUNT:
        problem = f"its offsets {shown([start, end])} are not two numbers in ascending order from 0"
        raise CheckpointError(problem, file=path, tensor=shown(name), cure=AGAIN)
    count = _bits(dtype, shape, path, name)
    if count != 8 * (end - start):
        problem = f"its offsets hold {end - start} bytes, and {dtype} of shape {shown(shape)} has {shown(f'{count} bits')}"
        raise CheckpointError(problem, file=path, tensor=shown(name), cure=AGAIN)
    return TensorRef(name, dtype, tuple(shape), path, begin + start, end - start)


def _bits(dtype: Any, shape: Any, path: str, name: str) -> int:
    """The bytes of a whole tensor."""
    count = DTYPE_BITS.get(dtype) if type(dtype) is str else None
    if count is None:
        cure = "Update sparkd, or store the tensor in another dtype"
        raise CheckpointError(f"its dtype {shown(dtype)} is not known", file=path, tensor=shown(name), cure=cure)
    if type(shape) is not list or len(shape) > MAX_DIMENSIONS:
        problem = f"its shape is not an array of at most {MAX_DIMENSIONS} numbers"
        raise CheckpointError(problem, file=path, tensor=shown(name), cure=AGAIN)
    for size in shape:
        if type(size) is not int or not 0 <= size <= MAX_COUNT:
            raise CheckpointError(f"its shape {shown(shape)} has a member that is not a size", file=path, tensor=shown(name), cure=AGAIN)
        count *= size
    return count


def _check_cover(tensors: Sequence[TensorRef], path: str, begin: int, data_bytes: int) -> None:
    """Check that the tensors cover the data without gap or overlap, as the format demands; this finds a truncated download."""
    if tensors and (need := max(tensor.offset + tensor.nbytes for tensor in tensors) - begin) > data_bytes:
        last = max(tensors, key=lambda tensor: tensor.offset + tensor.nbytes)
        problem = f"the file is cut off: its header describes {need} bytes of data and {data_bytes} are there"
        raise CheckpointError(problem, file=path, tensor=shown(last.name), cure=AGAIN)
    position, before = begin, ""
    for tensor in tensors:
        if tensor.offset != position:
            problem = "overlaps" if tensor.offset < position else "leaves a hole after"
            reason = f"its data {problem} that of {shown(before) if before else 'the header'}"
            raise CheckpointError(reason, file=path, tensor=shown(tensor.name), cure=AGAIN)
        position, before = tensor.offset + tensor.nbytes, tensor.name
    if position != begin + data_bytes:
        problem = f"{begin + data_bytes - position} bytes at its end belong to no tensor"
        raise CheckpointError(problem, file=path, cure=AGAIN)
