"""Owns which earlier start of an engine predicts the next one: the digest of all settings that change an engine's memory, and its profile.

Never measures: workers/kv does, and keeps that digest with its profile.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sparkd.capacity.footprint import MeasuredPeaks
from workers.kv.profiles import KeptProfile

# These flags alone are known to leave an engine's memory as it is. Any other flag makes it another engine, whose profile is
# not believed.
_TALK = ("tool-call-parser", "reasoning-parser", "enable-auto-tool-choice", "override-generation-config")
# Prefixes of the variables that vLLM, torch, NCCL and the kernels read. No prefix admits a secret such as a hub token.
FAMILIES = ("VLLM_", "TORCH", "PYTORCH_", "NCCL_", "CUDA_", "CUBLAS", "FLASHINFER_", "TRITON_", "OMP_", "SPARKD_")

# The name of each known machine's GPU: a profile is that of the machine that it was made on. `node` is the one that asks.
_DEVICES = {"spark": "GB10", "h200": "H200", "node": ""}


def engine_of(flags: Sequence[str], quantize: Any, env: Mapping[str, str], vllm: str | None, platform: str) -> str:
    """A digest of an entry without any `auto`.

    flags: of sparkd.config.engine_flags.flags_of. quantize: the value of its key. env: the engine's.
    vllm: its version; None if it is unknown.
    """
    heard = {name: value for name, value in env.items() if name.startswith(FAMILIES)}
    parts = [list(_counted(flags)), quantize, sorted(heard.items()), vllm, platform]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def peaks_of(
    profiles: Sequence[KeptProfile], engine: str, checkpoint: str | None, ways: tuple[int, int], hardware: str = "node"
) -> MeasuredPeaks | None:
    """The last measurements of this engine's rank 0 at this split; None if it never ran on this node.

    profiles: the newest first. checkpoint: the digest of its weight files (workers.kv.profiles.checkpoint_of).
    ways: tensor and pipeline size. hardware: a name of sparkd.hardware, or `node`.
    """
    device = _DEVICES.get(hardware)
    if device is None or checkpoint is None:
        return None
    about = {"checkpoint": checkpoint, "world": [*ways, 0]}
    own = (kept for kept in profiles if kept.engine == engine and device in kept.about.get("device", ""))
    measured = next((kept.profile for kept in own if about.items() <= kept.about.items()), None)
    return None if measured is None else MeasuredPeaks(measured.demand.peak, measured.demand.graphs)


def _counted(flags: Sequence[str]) -> Iterator[str]:
    skipped = False
    for flag in flags:
        if flag.startswith("--"):
            skipped = flag[2:].partition("=")[0].replace("_", "-") in _TALK
        if not skipped:
            yield flag
