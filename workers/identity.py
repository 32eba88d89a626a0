"""What a node would serve a model with: vLLM's release, the plugin's build, the checkpoint's files. Imports no engine, reads no weight."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sparkd.errors import RankError
from workers.hub_cache import snapshot_of
from workers.runtime import probe

WEIGHTS = (".safetensors", ".bin", ".gguf")
# What decides shapes and names besides the weights. Rank 0 alone uses the tokenizer.
CONFIG = ("config.json", "hf_quant_config.json", "model.safetensors.index.json")
DIGITS = 12
_PREFIX_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # of the reference reader (safetensors/src/tensor.rs, MAX_HEADER_SIZE)
_OURS = Path(__file__).resolve().parent


def identity(runtime: str, model: str, revision: str | None, environ: Mapping[str, str]) -> dict[str, Any]:
    """{"vllm", "platform", "plugin", "files"}: plain JSON that is equal on two nodes where ranks of one model may be on both.

    files: name -> [bytes, digest], the digest of a safetensors file over its header alone, "" where only the size is looked at; None
    where the model is not on this node. Times and folders are left out, since a copy has others. Blocks. Raises RankError.
    """
    folder = Path(model) if model.startswith("/") else snapshot_of(model, revision, environ)
    try:
        files = _files(folder) if folder is not None and folder.is_dir() else None
    except OSError as error:
        raise RankError(f"{error.filename or folder} cannot be read: {error.strerror or error}. Check its owner and mode.") from error
    found = probe(runtime)
    return {"vllm": found.vllm, "platform": found.platform, "plugin": plugin(), "files": files}


@cache
def plugin() -> str:
    """Hex digits over the sources of this folder: two builds of one version differ too."""
    digest = hashlib.sha256()
    for path in sorted(_OURS.rglob("*.py")):
        digest.update(f"{path.relative_to(_OURS)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:DIGITS]


def _files(folder: Path) -> dict[str, list[Any]]:
    return {
        name: [os.stat(folder / name).st_size, _digest(folder / name)]
        for name in sorted(os.listdir(folder))
        if name.endswith(WEIGHTS) or name in CONFIG
    }


def _digest(path: Path) -> str:
    if path.name in CONFIG:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:DIGITS]
    if path.suffix != ".safetensors":
        return ""
    with open(path, "rb") as file:
        prefix = file.read(_PREFIX_BYTES)
        # No more than the file holds is read, whatever the number says; a file that lies about it the engine refuses.
        header = file.read(min(int.from_bytes(prefix, "little"), _MAX_HEADER_BYTES))
    return hashlib.sha256(prefix + header).hexdigest()[:DIGITS]
