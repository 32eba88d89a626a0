"""Owns planning for the node that the daemon runs on: which machine it is, and where a model lies that it knows. Never loads one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from sparkd.admission import machine
from sparkd.checkpoint import Checkpoint, read_checkpoint
from sparkd.config import Memory
from sparkd.errors import CheckpointError
from sparkd.hardware import KNOWN, Hardware
from sparkd.model_config import ModelConfig
from sparkd.plan_question import Question
from sparkd.quantizing import AUTO
from sparkd.source import snapshot_of, source_of
from workers.meminfo import sample
from workers.runtime import GPU_SIGNS


class QuestionHere(Question):
    """hardware: node is the one that the daemon runs on."""

    hardware: Literal["node", "spark", "h200"] = "node"


def hardware_here(name: str) -> Hardware:
    """`node`: this machine, with all but the system's reserve to plan with; else a known one."""
    if name in KNOWN:
        return KNOWN[name]
    total = int(sample()["mem_total_bytes"])
    platform = "cuda" if any(Path(sign).exists() for sign in GPU_SIGNS) else "cpu"
    return machine(platform, total, Memory().os_reserve_bytes(total))


def checkpoint_here(name: str, find: Callable[[str], ModelConfig | None]) -> tuple[str, Checkpoint, Any]:
    """(folder or hub id, headers, configured `quantize`, None for any). find: a model that the daemon knows. Raises CheckpointError."""
    spec = find(name)
    source = source_of(name) if spec is None else spec.model
    configured = None if spec is None or spec.quantize == AUTO else spec.quantize
    if source.startswith("/"):
        return source, read_checkpoint(source), configured
    folder = snapshot_of(source, spec.revision if spec is not None else None, os.environ)
    if folder is None:
        raise CheckpointError(
            f"{source} is not in this node's hub cache", cure="Load it once, or ask `sparkd plan`, which looks on the hub"
        )
    return source, read_checkpoint(folder), configured
