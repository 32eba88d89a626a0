"""Identifies a node's software and model files: vLLM's release, the plugin's build, the checkpoint's files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sparkd.errors import RankError
from workers.host.hub_cache import snapshot_of
from workers.host.runtime import probe

WEIGHTS = (".safetensors", ".bin", ".gguf")
# The files that decide shapes and names besides the weights. Rank 0 alone uses the tokenizer.
CONFIG = ("config.json", "hf_quant_config.json", "model.safetensors.index.json")
DIGITS = 12
# Blocks of each weights file that are read. A difference in a twentieth of a file is detected in 32 of 33 cases; where a hundred files
# differ like that, in at least one of them for certain.
SAMPLES, SAMPLE_BYTES = 64, 4096
_PREFIX_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # of the reference reader (safetensors/src/tensor.rs, MAX_HEADER_SIZE)
_OURS = Path(__file__).resolve().parents[1]


def identity(runtime: str, model: str, revision: str | None, environ: Mapping[str, str]) -> dict[str, Any]:
    """{"vllm", "platform", "plugin", "files"}: plain JSON. Ranks of one model may run on two nodes where this is equal.

    files: name -> [bytes, digest]; None where the model is not on this node. The digest of weights covers the header and SAMPLES blocks
    spread over the file, because two fine-tunes of a model differ in nothing else. Times and folders do not count, since a copy has
    others. Blocks. Raises RankError.
    """
    folder = Path(model) if model.startswith("/") else snapshot_of(model, revision, environ)
    try:
        files = _files(folder) if folder is not None and folder.is_dir() else None
    except OSError as error:
        raise RankError(f"{error.filename or folder} cannot be read: {error.strerror or error}. Check its owner and mode.") from error
    runtime_facts = probe(runtime)
    return {"vllm": runtime_facts.vllm, "platform": runtime_facts.platform, "plugin": plugin(), "files": files}


@cache
def plugin() -> str:
    """A digest, in hex digits, of the sources of the package workers: two builds of one version differ too."""
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
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        if path.suffix == ".safetensors":
            prefix = file.read(_PREFIX_BYTES)
            # The read ends with the file, whatever length it states; the engine refuses a file with a wrong length.
            digest.update(prefix + file.read(min(int.from_bytes(prefix, "little"), _MAX_HEADER_BYTES)))
        # Read-ahead would put half of a checkpoint into the page cache.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        last = max(0, os.fstat(file.fileno()).st_size - SAMPLE_BYTES)
        for at in sorted({last * number // (SAMPLES - 1) for number in range(SAMPLES)}):
            digest.update(os.pread(file.fileno(), SAMPLE_BYTES, at))
    return digest.hexdigest()[:DIGITS]
