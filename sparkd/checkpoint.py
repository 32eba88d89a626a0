"""Owns what the weights of a checkpoint are, from config.json and the safetensors headers. Never reads a weight, never imports torch.

Only the standard library is needed: the loader imports this inside Python environments that are not sparkd's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sparkd.errors import CheckpointError
from sparkd.safetensors import AGAIN, Shard, TensorRef, loads, open_regular, read_header, shown
from sparkd.source_quantization import SourceQuantization, source_quantization
from sparkd.tensor_class import CLASSES, VISION_PARTS, tensor_class

__all__ = ["CLASSES", "VISION_PARTS", "Checkpoint", "Shard", "SourceQuantization", "TensorRef", "read_checkpoint", "tensor_class"]

INDEX = "model.safetensors.index.json"
# Far above any real one (a 60,000-tensor index is 6 MB); a file of another kind under this name is refused before it is parsed.
MAX_JSON_BYTES = 64 << 20
_OTHER_KINDS = frozenset({".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack"})


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder's weights. tensors: by name, in the order of the shards, then of the offsets; config: config.json."""

    folder: str
    config: Mapping[str, Any]
    shards: tuple[Shard, ...]
    tensors: Mapping[str, TensorRef]
    quantization: SourceQuantization | None

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, as stored."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """What a folder's checkpoint holds, from its headers alone. Raises CheckpointError, which names file, tensor, reason and cure.

    The files are those that model.safetensors.index.json names, else every *.safetensors (without consolidated*, Mistral's second copy,
    where model* is there too). The snapshot folders of a hub cache, whose files are links, work.
    """
    folder = os.path.abspath(os.fspath(folder))
    names = _listing(folder)
    if "config.json" not in names:
        raise CheckpointError("there is no config.json in it", file=folder, cure="Give the folder that holds the model's own files")
    config = _read_object(os.path.join(folder, "config.json"))
    weight_map = _weight_map(folder) if INDEX in names else None
    files = sorted(set(weight_map.values())) if weight_map is not None else _weight_files(folder, names)
    tensors: dict[str, TensorRef] = {}
    shards: list[Shard] = []
    for file in files:
        shard, found = read_header(os.path.join(folder, file))
        shards.append(shard)
        for tensor in found:
            owner = weight_map.get(tensor.name) if weight_map is not None else None
            if owner is not None and owner != file:
                continue
            if tensor.name in tensors:
                told = f"the same tensor is in {os.path.basename(tensors[tensor.name].path)} too, and no index says which one counts"
                raise CheckpointError(told, file=tensor.path, tensor=shown(tensor.name), cure="Remove the file that is left over")
            tensors[tensor.name] = tensor
    for name, file in (weight_map or {}).items():
        if name not in tensors:
            told = f"{INDEX} says that this tensor is in {file}, and it is not"
            raise CheckpointError(told, file=os.path.join(folder, file), tensor=shown(name), cure="Download index and shard again")
    if not tensors:
        raise CheckpointError("its safetensors files hold no tensor", file=folder, cure=AGAIN.replace("file", "checkpoint"))
    extra = os.path.join(folder, "hf_quant_config.json")
    modelopt = _read_object(extra) if "hf_quant_config.json" in names else None
    return Checkpoint(folder, config, tuple(shards), tensors, source_quantization(config, modelopt, tensors))


def _listing(folder: str) -> set[str]:
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        reason, cure = "the folder is not there", "Download the model, or correct the path"
    except NotADirectoryError:
        reason, cure = "it is a file where the checkpoint's folder is expected", "Give the folder that holds config.json and *.safetensors"
    except (OSError, ValueError) as error:
        reason, cure = f"the folder cannot be read: {getattr(error, 'strerror', None) or error}", "Check its owner and mode"
    raise CheckpointError(reason, file=shown(folder), cure=cure)


def _read_object(path: str) -> dict[str, Any]:
    cure = "Download the file again"
    try:
        with open_regular(path) as file:
            raw = file.readall() if os.fstat(file.fileno()).st_size <= MAX_JSON_BYTES else None
    except OSError as error:
        raise CheckpointError(f"it cannot be read: {error.strerror}", file=path, cure=cure) from None
    if raw is None:
        raise CheckpointError(f"it is larger than {MAX_JSON_BYTES >> 20} MiB", file=path, cure=cure)
    value = loads(raw, path, cure)
    if not isinstance(value, dict):
        raise CheckpointError("it holds no JSON object", file=path, cure=cure)
    return value


def _weight_map(folder: str) -> dict[str, str]:
    """Tensor name -> file name, as the index says. A file outside the folder is refused: an index must not reach other files."""
    path = os.path.join(folder, INDEX)
    weight_map = _read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("it has no weight_map that names a tensor", file=path, cure="Download the index again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.isprintable() or file in ("", ".", "..") or "/" in file:
            told = f"its weight_map names {shown(file)}, which is no file of this folder"
            raise CheckpointError(told, file=path, tensor=shown(name), cure="Download the index again")
    return weight_map


def _weight_files(folder: str, names: Iterable[str]) -> list[str]:
    files = sorted(name for name in names if name.endswith(".safetensors"))
    if any(name.startswith("model") for name in files):
        files = [name for name in files if not name.startswith("consolidated")]
    if files:
        return files
    others = sorted({os.path.splitext(name)[1] for name in names} & _OTHER_KINDS)
    only = ", ".join(f"*{end}" for end in others)
    reason = f"there is no *.safetensors file in it, only {only}" if others else "there are no weights in it"
    raise CheckpointError(reason, file=folder, cure="Download the model's safetensors files, or convert it to them")
