"""model.safetensors.index.json: the file of each tensor."""

from __future__ import annotations

from typing import Any

from sparkd.checkpoint.foreign_json import parsed, shown
from sparkd.errors import CheckpointError

INDEX = "model.safetensors.index.json"
AGAIN = "Download the index again"


def read_index(raw: bytes, path: str) -> dict[str, str]:
    """Tensor -> name of its file. Raises CheckpointError.

    A path that may lead out of the folder is refused, so that an index cannot reach other files.
    """
    weight_map = object_of(raw, path, AGAIN).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("it has no weight_map that names a tensor", file=path, cure=AGAIN)
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.isprintable() or file in ("", ".", "..") or "/" in file:
            problem = f"its weight_map names {shown(file)}, which is not the name of a file in this folder"
            raise CheckpointError(problem, file=path, tensor=shown(name), cure=AGAIN)
    return weight_map


def object_of(raw: bytes, path: str, cure: str) -> dict[str, Any]:
    """The JSON object in a foreign file. Raises CheckpointError."""
    value = parsed(raw, path, cure)
    if not isinstance(value, dict):
        raise CheckpointError("it holds no JSON object", file=path, cure=cure)
    return value
