"""The files of a checkpoint that are no weights: config.json, tokenizer, templates, licence. Never touches a tensor."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sparkd.checkpoint import Checkpoint
from workers.cache.layout import INDEX, ShardLayout, index_json
from workers.cache.manifest import MANIFEST, USED, OwnFile

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
