"""Small safetensors files and checkpoints, written with the standard library alone. Never writes a value other than zero."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkd.checkpoint import Checkpoint, SourceQuantization, TensorRef
from sparkd.checkpoint.header import DTYPE_BITS

Shape = Sequence[int]


def nbytes(dtype: str, shape: Shape) -> int:
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def header_of(tensors: Mapping[str, tuple[str, Shape]]) -> dict[str, Any]:
    """The header of a file with these tensors, one behind the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return header


def pack(header: Any, data_bytes: int | None = None) -> bytes:
    """A whole file. header: an object, or its bytes; data_bytes: how many follow, as the header says where it is left out."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if data_bytes is None:
        data_bytes = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


def write_shard(path: Path, tensors: Mapping[str, tuple[str, Shape]]) -> Path:
    path.write_bytes(pack(header_of(tensors)))
    return path


def write_folder(
    folder: Path, shards: Mapping[str, Mapping[str, tuple[str, Shape]]], config: Mapping[str, Any] | None = None, *, index: bool = False
) -> Path:
    """A checkpoint. shards: file name -> tensors; index: with a model.safetensors.index.json over all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    for file, tensors in shards.items():
        write_shard(folder / file, tensors)
    if index:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_sparse(folder: Path, tensors: Mapping[str, tuple[str, Shape]], config: Mapping[str, Any]) -> Path:
    """A checkpoint of any size whose data are a hole: its headers are real, and it takes no room."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header = header_of(tensors)
    begin = pack(header, 0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(begin)
        file.truncate(len(begin) + sum(nbytes(dtype, shape) for dtype, shape in tensors.values()))
    return folder


def checkpoint_of(
    tensors: Mapping[str, tuple[str, Shape]], config: Mapping[str, Any] | None = None, quantization: SourceQuantization | None = None
) -> Checkpoint:
    """A checkpoint that is on no disk."""
    at, refs = 0, {}
    for name, (dtype, shape) in tensors.items():
        refs[name] = TensorRef(name, dtype, tuple(shape), "/model/model.safetensors", at, nbytes(dtype, shape))
        at += refs[name].nbytes
    return Checkpoint("/model", config or {}, (), refs, quantization)


def layered(count: int, shapes: Mapping[str, Shape], prefix: str = "model.layers", dtype: str = "BF16") -> dict[str, tuple[str, Shape]]:
    """The same tensors in `count` layers."""
    return {f"{prefix}.{layer}.{name}": (dtype, shape) for layer in range(count) for name, shape in shapes.items()}
