"""One safetensors file's header: its content, checked against the file.

The format: github.com/huggingface/safetensors, README.md, "Format"; the checks are those of its Rust reader (`Metadata::validate`).
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

from sparkd.checkpoint.foreign_json import MAX_HEADER_VALUES, MAX_JSON_BYTES, parsed, shown
from sparkd.checkpoint.tensors import TensorRef
from sparkd.errors import CheckpointError, CheckpointIncomplete, CheckpointUnread

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
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class Shard:
    """One file's identity.

    header_bytes: size of the JSON with its 8-byte length, after which the data begins
    header_sha256: their digest
    """

    path: str
    size_bytes: int
    mtime_ns: int
    header_bytes: int
    header_sha256: str


def read_header(path: str) -> tuple[Shard, list[TensorRef]]:
    """The identity of the file at an absolute path, and its tensors in the order of their offsets. Raises CheckpointError.

    Reads the header only. The file's real size bounds the memory, whatever the length field claims.
    """
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            length = header_length(file.read(PREFIX_BYTES), path, status.st_size)
            header = file.read(length)
    except OSError as error:
        raise CheckpointUnread(f"it cannot be read: {error.strerror}", file=path, cure="Check the disk") from None
    return parse_header(header, path, status.st_size, status.st_mtime_ns)


def header_length(prefix: bytes, path: str, size_bytes: int) -> int:
    """Bytes of the JSON. Raises CheckpointError.

    prefix: the first 8 bytes of the file, fewer if it is shorter.
    size_bytes: the file's.
    """
    if len(prefix) < PREFIX_BYTES:
        raise CheckpointError(f"the file ends after {len(prefix)} bytes, before the length of its header", file=path, cure=AGAIN)
    if prefix.startswith(b"version "):
        raise CheckpointError("it is a Git LFS pointer, not the file itself", file=path, cure="Run `git lfs pull` in its folder")
    length = int.from_bytes(prefix, "little")
    if length > size_bytes - PREFIX_BYTES:
        problem = f"its first bytes give the header {length} bytes, and the file has {size_bytes}"
        raise CheckpointError(f"{problem}: it is cut off, or not a safetensors file", file=path, cure=AGAIN)
    if length > MAX_JSON_BYTES:
        problem = f"its first bytes give the header {length} bytes, more than the limit of {MAX_JSON_BYTES}"
        raise CheckpointError(problem, file=path, cure="Store the model in more than one file")
    return length


def parse_header(header: bytes, path: str, size_bytes: int, mtime_ns: int) -> tuple[Shard, list[TensorRef]]:
    """Parse a header, the JSON without its length, and check it against the file's size. Raises CheckpointError."""
    begin = PREFIX_BYTES + len(header)
    table = parsed(header, path, AGAIN, most=MAX_HEADER_VALUES)
    if not isinstance(table, dict):
        raise CheckpointError("the header is no JSON object", file=path, cure=AGAIN)
    if not isinstance(table.pop(_METADATA, {}), dict | None):
        raise CheckpointError(f"{_METADATA} in the header is no JSON object", file=path, cure=AGAIN)
    tensors = [_tensor(name, entry, path, begin) for name, entry in table.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    _check_cover(tensors, path, begin, size_bytes - begin)
    digest = hashlib.sha256(len(header).to_bytes(PREFIX_BYTES, "little") + header).hexdigest()
    return Shard(path, size_bytes, mtime_ns, begin, digest), tensors


def open_regular(path: str) -> BinaryIO:
    """Open a file. Raises CheckpointError where it is missing, is no regular file or cannot be opened."""
    try:
        # A FIFO or a device must neither block the start nor be read.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError("it is not a regular file", file=path, cure="Put the checkpoint's own files there")
        return open(path, "rb")
    except FileNotFoundError:
        linked = os.path.islink(path)
        reason = f"the file it links to, {os.readlink(path)}, is not there" if linked else "the file is not there"
        raise CheckpointIncomplete(reason, file=path, cure=AGAIN) from None
    except OSError as error:
        raise CheckpointUnread(f"it cannot be opened: {error.strerror}", file=path, cure="Check its owner and mode") from None


def _tensor(name: str, entry: Any, path: str, begin: int) -> TensorRef:
    """One entry of the header, checked by itself."""
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if type(dtype) is str and dtype not in DTYPE_BITS:
            raise _fault(f"its dtype {shown(dtype)} is not known", path, name, "Update sparkd, or store the tensor in another dtype")
        are_sizes = all(type(size) is int and 0 <= size <= MAX_COUNT for size in (*shape, start, end))
        is_named = name.isprintable() and name
        if is_named and are_sizes and len(shape) <= MAX_DIMENSIONS and DTYPE_BITS[dtype] * prod(shape) == 8 * (end - start):
            return TensorRef(name, dtype, tuple(shape), path, begin + start, end - start)
    except (TypeError, KeyError, ValueError):
        pass
    raise _fault(f"its entry {shown(entry)} is not {{dtype, shape, data_offsets: [begin, end]}} with as many bytes", path, name)


def _check_cover(tensors: Sequence[TensorRef], path: str, begin: int, data_bytes: int) -> None:
    """Check that the tensors cover the data without gap or overlap, as the format demands; this finds a truncated download."""
    last = max(tensors, key=lambda tensor: tensor.offset + tensor.nbytes, default=None)
    if last is not None and (need := last.offset + last.nbytes - begin) > data_bytes:
        raise _fault(f"the file is cut off: its header describes {need} bytes of data and {data_bytes} are there", path, last.name)
    position, before = begin, ""
    for tensor in tensors:
        if tensor.offset != position:
            problem = "overlaps" if tensor.offset < position else "leaves a hole after"
            raise _fault(f"its data {problem} that of {shown(before) if before else 'the header'}", path, tensor.name)
        position, before = tensor.offset + tensor.nbytes, tensor.name
    if position != begin + data_bytes:
        problem = f"{begin + data_bytes - position} bytes at its end belong to no tensor"
        raise CheckpointError(problem, file=path, cure=AGAIN)


def _fault(problem: str, path: str, tensor: str, cure: str = AGAIN) -> CheckpointError:
    return CheckpointError(problem, file=path, tensor=shown(tensor), cure=cure)
