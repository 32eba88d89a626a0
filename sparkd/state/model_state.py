"""Where a model is, and the one table of legal steps."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from sparkd.errors import StateError


class ModelState(StrEnum):
    """Where a model is. Only the supervisor assigns it, and only along LEGAL."""

    STOPPED = "STOPPED"
    PLANNED = "PLANNED"
    LOADING = "LOADING"
    WARMING = "WARMING"
    SIZING = "SIZING"
    READY = "READY"
    DRAINING = "DRAINING"
    STOPPING = "STOPPING"
    FAILED = "FAILED"


STARTING = frozenset({ModelState.PLANNED, ModelState.LOADING, ModelState.WARMING, ModelState.SIZING})
SERVING = frozenset({ModelState.READY, ModelState.DRAINING})
AWAY = frozenset({ModelState.STOPPED, ModelState.FAILED})
RESIDENT = STARTING - {ModelState.PLANNED} | SERVING | {ModelState.STOPPING}

# An adopted rank enters at LOADING; it is READY once its server answers and it has answered a question, now or before. Stock vLLM
# warms and sizes in one breath and old releases say neither in the log, so the three starting states may be passed over forwards,
# never backwards.
_S = ModelState
LEGAL: Mapping[ModelState, frozenset[ModelState]] = {
    _S.STOPPED: frozenset({_S.PLANNED, _S.LOADING, _S.FAILED, _S.STOPPING}),
    _S.PLANNED: frozenset({_S.LOADING, _S.STOPPING, _S.STOPPED, _S.FAILED}),
    _S.LOADING: frozenset({_S.WARMING, _S.SIZING, _S.READY, _S.STOPPING, _S.FAILED}),
    _S.WARMING: frozenset({_S.SIZING, _S.READY, _S.STOPPING, _S.FAILED}),
    _S.SIZING: frozenset({_S.READY, _S.STOPPING, _S.FAILED}),
    _S.READY: frozenset({_S.DRAINING, _S.STOPPING, _S.FAILED}),
    _S.DRAINING: frozenset({_S.STOPPING, _S.READY, _S.FAILED}),
    _S.STOPPING: frozenset({_S.STOPPED, _S.FAILED}),
    _S.FAILED: frozenset({_S.PLANNED, _S.LOADING, _S.STOPPED, _S.STOPPING}),
}


def check_step(old: ModelState, new: ModelState) -> None:
    """Raises StateError unless `old -> new` is in LEGAL."""
    if new not in LEGAL[old]:
        raise StateError(f"A model cannot go from {old} to {new}; legal next states are {', '.join(sorted(LEGAL[old]))}.")
