"""The file in which the figures of a calibration are kept, and the memory that one takes."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from sparkd.checkpoint import Checkpoint

# In the folder of quantized weights.
FOLDER = ".calibrations"
# Beside the model: the layers' outputs, the probabilities of all tokens, and one layer more.
BESIDE_BYTES = 4 << 30
# Memory that stays free for the rank and for others while the model runs: above the guard's first limit.
SPARE_BYTES = 8 << 30
# A higher number where the same text would give other figures.
_VERSION = 1


def calibration_file(cache_dir: str, checkpoint: Checkpoint, text: str) -> Path:
    """The file with the figures of this checkpoint and text, which need not be there. cache_dir: the folder of quantized weights."""
    shards = [(os.path.basename(shard.path), shard.size_bytes, shard.mtime_ns, shard.header_sha256) for shard in checkpoint.shards]
    parts = [_VERSION, os.path.realpath(checkpoint.folder), shards, hashlib.sha256(text.encode()).hexdigest()]
    return Path(cache_dir, FOLDER, f"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}.json")
