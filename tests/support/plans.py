"""A plan as the tests ask for it: of an entry, or of one made for a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparkd.capacity.evidence import nobody
from sparkd.capacity.plan import plan
from sparkd.capacity.planned_entry import PlannedEntry, PlanRequest, made_for
from sparkd.checkpoint import Checkpoint, read_checkpoint
from sparkd.config.config import Config, ModelConfig
from sparkd.hardware import SPARK, Hardware
from workers.host.runtime import API_SERVER

# Neither this machine's profiles nor its quantized weights.
NOWHERE = Config(state_dir=Path("/none/sparkd"))


def entry_for(model: str, config: Config = NOWHERE, vllm: str | None = None) -> PlannedEntry:
    """As a plan makes it for a folder or a hub id."""
    return PlannedEntry(made_for(model), config, vllm, API_SERVER, None, {"model": model})


def entry_with(spec: ModelConfig, config: Config = NOWHERE) -> PlannedEntry:
    return PlannedEntry(spec, config, None, API_SERVER)


def planned(
    model: str | Path | PlannedEntry, hardware: Hardware = SPARK, checkpoint: Checkpoint | None = None, ask: Any = None, **asked: Any
) -> dict[str, Any]:
    """asked: fields of a PlanRequest."""
    entry = model if isinstance(model, PlannedEntry) else entry_for(str(model))
    checkpoint = checkpoint or read_checkpoint(entry.spec.model)
    return plan(PlanRequest(model=entry.spec.model, **asked), entry, checkpoint, hardware, ask=ask or nobody)
