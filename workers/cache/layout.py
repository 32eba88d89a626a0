"""Lays out a checkpoint's folder: the place of each tensor in its shards, their headers and index, and the files that are no weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkd.checkpoint import Checkpoint
from sparkd.errors import CheckpointError
from workers.cache.manifest import MANIFEST, USED, OwnFile
from workers.quantization.fusion import EXPERT, group_of

SHARD_BYTES = 4 << 30
INDEX = "model.safetensors.index.json"
# Tensors begin at multiples of this, so that every element of every dtype is aligned to its size.
ALIGNMENT = 8
# Bytes of one element, for the dtypes of whole bytes (safetensors/src/tensor.rs, Dtype::bitsize).
ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
# transformers refuses a file that does not name the framework of its tensors.
_METADATA = {"format": "pt"}
FAMILIES = 16  # the experts of two layers in two matrices and four parts
# Limit of one file. The largest so far is a tokenizer of 33 MB (Gemma 3).
MAX_BYTES = 256 << 20
_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".ot",
    ".tflite",
    ".npz",
    ".zip",
    ".tar",
    ".gz",
)
# Files that describe the source's weights or its quantization; the cache has its own.
_REPLACED = {"config.json", "hf_quant_config.json", INDEX, MANIFEST, USED}
# The only subfolder that transformers reads.
_TEMPLATES = "additional_chat_templates"

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class ShardTensor:
    """One tensor in a shard.

    shard: its number from 0.
    offset: bytes from the beginning of that file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One file. header: includes its 8-byte length, so the data begins at len(header)."""

    name: str
    header: bytes
    size_bytes: int
    tensors: tuple[ShardTensor, ...]


def neighbours(tensors: Tensors) -> Tensors:
    """The same tensors, with a layer's experts adjacent part by part and gate and up alternating, as in vLLM's parameters.

    A load can then copy a run of experts at once. Only tensors that arrive together are moved: if a layer's experts lie far apart in the
    source, one block of the file would have to wait for all of them.
    """
    ordered: dict[str, tuple[str, tuple[int, ...]]] = {}
    waiting: dict[tuple[str, str, str], list[tuple[int, str]]] = {}

    def flush() -> None:
        for family in waiting.values():
            ordered.update((name, tensors[name]) for _, name in sorted(family))
        waiting.clear()

    for name, form in tensors.items():
        if (expert := EXPERT.search(name)) is None:
            flush()
            ordered[name] = form
            continue
        module, _, part = name[expert.end() :].rpartition(".")
        key = (name[: expert.start()], group_of(module, ""), part)
        if key not in waiting and len(waiting) >= FAMILIES:
            flush()
        waiting.setdefault(key, []).append((int(expert[1]), name))
    flush()
    return ordered


def lay_out(tensors: Tensors, shard_bytes: int = SHARD_BYTES) -> list[ShardLayout]:
    """Shards of at most `shard_bytes` of data, or of one larger tensor, named as transformers names them.

    tensors: name -> (safetensors dtype code, shape), in the order of their arrival, which is also their order in the file, so that writes
    are sequential. Only tensors whose size is no multiple of 8 bytes come at the end of their shard, larger dtypes first, because the
    format allows no gaps and every reader needs aligned elements. Raises CheckpointError for an unknown dtype.
    """
    groups: list[list[tuple[str, str, tuple[int, ...], int]]] = [[]]
    held = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = tensor_bytes(name, dtype, shape)
        if groups[-1] and held + nbytes > shard_bytes:
            groups.append([])
            held = 0
        groups[-1].append((name, dtype, shape, nbytes))
        held += nbytes
    return [_shard(number, len(groups), group) for number, group in enumerate(groups)]


def index_json(shards: Iterable[ShardLayout]) -> bytes:
    """The content of model.safetensors.index.json."""
    tensors = [(tensor, shard.name) for shard in shards for tensor in shard.tensors]
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor, _ in tensors)},
        "weight_map": {tensor.name: name for tensor, name in tensors},
    }
    return json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"


def tensor_bytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor. Raises CheckpointError for an unknown dtype, or one with less than a byte for an element."""
    size = ITEM_BYTES.get(dtype)
    if size is None:
        raise CheckpointError(f"a {dtype} tensor cannot be stored", tensor=name, cure=f"Give it one of {', '.join(ITEM_BYTES)}")
    return size * math.prod(shape)


def _shard(number: int, count: int, group: list[tuple[str, str, tuple[int, ...], int]]) -> ShardLayout:
    odd = [tensor for tensor in group if tensor[3] % ALIGNMENT]
    ordered = [tensor for tensor in group if not tensor[3] % ALIGNMENT]
    ordered += sorted(odd, key=lambda tensor: -ITEM_BYTES[tensor[1]])
    entries: dict[str, object] = {"__metadata__": _METADATA}
    at = 0
    for name, dtype, shape, nbytes in ordered:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    tensors = []
    at = len(header)
    for name, dtype, shape, nbytes in ordered:
        tensors.append(ShardTensor(name, dtype, tuple(shape), number, at, nbytes))
        at += nbytes
    return ShardLayout(f"model-{number + 1:05d}-of-{count:05d}.safetensors", header, at, tuple(tensors))


def write_companions(checkpoint: Checkpoint, folder: str, described: Mapping[str, Any], shards: Sequence[ShardLayout]) -> list[OwnFile]:
    """Write the files into `folder` that make its shards a checkpoint, each synced to the disk. Returns their records. Raises OSError.

    described: the quantization_config, empty where the source's own still applies.
    """
    files = [
        _written(os.path.join(folder, "config.json"), config_json(checkpoint.config, described)),
        _written(os.path.join(folder, INDEX), index_json(shards)),
    ]
    for name, path in companions(checkpoint.folder):
        target = os.path.join(folder, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(path, "rb") as file:
            files.append(_written(target, file.read(MAX_BYTES)))
    return [OwnFile(os.path.relpath(path, folder), size_bytes, digest) for path, size_bytes, digest in files]


def companions(folder: str) -> Iterator[tuple[str, str]]:
    """(name in the folder, path) of every file to copy, links followed. Raises OSError."""
    templates = os.path.join(folder, _TEMPLATES)
    parts = ["", _TEMPLATES] if os.path.isdir(templates) else [""]
    for part in parts:
        for name in sorted(os.listdir(os.path.join(folder, part))):
            path = os.path.join(folder, part, name)
            if name.startswith(".") or name in _REPLACED or name.endswith((*_WEIGHTS, ".index.json")):
                continue
            if os.path.isfile(path) and os.path.getsize(path) <= MAX_BYTES:
                yield os.path.join(part, name), path


def companions_bytes(folder: str) -> int:
    """The most bytes that the copies need. Raises OSError."""
    return sum(os.path.getsize(path) for _, path in companions(folder))


def config_json(config: Mapping[str, Any], described: Mapping[str, Any]) -> bytes:
    """The source's config.json with this quantization_config in place of its own."""
    written = dict(config)
    if described:
        written.pop("compression_config", None)
        text = written.get("text_config")
        if isinstance(text, Mapping):
            written["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
        written["quantization_config"] = dict(described)
    return json.dumps(written, indent=2, ensure_ascii=False).encode() + b"\n"


def _written(path: str, data: bytes) -> tuple[str, int, str]:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        with contextlib.suppress(OSError):  # only advice: the file is not read again soon
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path, len(data), hashlib.sha256(data).hexdigest()
