"""How each model's last start went, phase by phase, as its rank reports them.

A start is kept in memory only: after a restart of the daemon it is unknown until the model starts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sparkd.state.model_state import STARTING, ModelState
from sparkd.state.snapshot import ModelView, Snapshot
from sparkd.units import GIB

# A loader that quantizes reads while it does, so all bytes of its load are those of `quantize`, and there is no `read`. An engine warms up
# with the capture of its CUDA graphs, where it has any.
MEMORY, ENGINE, READ, QUANTIZE = "memory back", "engine", "read", "quantize"

# The loader's name of weights that it only reads.
AS_STORED = "bf16"


@dataclass(frozen=True, slots=True)
class StartPhase:
    """A phase of a start. A loader that quantizes reads in `quantize`. vLLM's own loader tells the size of the weights once it is done.

    begin_s: after the start began.
    seconds: null while it goes on.
    bytes: read from the disk in it, null if its loader does not say.
    """

    name: str
    begin_s: float
    seconds: float | None
    bytes: int | None
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class ModelStart:
    """The last start that this run of the daemon has seen.

    seconds: null while it goes on.
    ended: READY, FAILED or STOPPED.
    """

    model: str
    disk_bytes_per_s: float | None
    began_s: float | None = None
    seconds: float | None = None
    ended: str | None = None
    phases: Sequence[StartPhase] = ()


@dataclass(slots=True)
class _Start:
    """Times are wall-clock seconds.

    phases: when each began.
    read_bytes: from the disk.
    """

    began_s: float
    phases: dict[str, float] = field(default_factory=dict)
    read_bytes: int | None = None
    ended: str | None = None
    end_s: float | None = None

    def look(self, view: ModelView, now_s: float) -> None:
        if view.state is ModelState.PLANNED:
            self.phases.setdefault(MEMORY, now_s)
            return
        waited = {MEMORY: self.phases[MEMORY]} if MEMORY in self.phases else {}
        self.phases = waited | _begun(view, self.phases.get(ENGINE, now_s))
        self.began_s = min(self.began_s, *self.phases.values())
        self.read_bytes = _read_bytes(view)

    def rows(self) -> list[StartPhase]:
        rows = []
        begun = sorted(self.phases.items(), key=lambda phase: phase[1])
        ends = [*(begin_s for _, begin_s in begun[1:]), self.end_s]
        for (name, begin_s), end_s in zip(begun, ends, strict=True):
            seconds = None if end_s is None else max(0.0, end_s - begin_s)
            nbytes = self.read_bytes if name in (READ, QUANTIZE) else None
            rate = nbytes / seconds if nbytes and seconds else None
            rows.append(StartPhase(name, round(begin_s - self.began_s, 3), None if seconds is None else round(seconds, 3), nbytes, rate))
        return rows


class Starts:
    """One start for each model, the last."""

    def __init__(self) -> None:
        self._starts: dict[str, _Start] = {}

    def look(self, snapshot: Snapshot) -> None:
        """With each look of the supervisor, which come each quarter of a second while a model starts."""
        for name, view in snapshot.models.items():
            start = self._starts.get(name)
            starting = view.state in STARTING
            if starting and (start is None or start.ended is not None):
                start = self._starts[name] = _Start(snapshot.at_s)
            if start is None or start.ended is not None:
                continue
            if starting or view.state is ModelState.READY:
                start.look(view, snapshot.at_s)
            if view.state is ModelState.READY:
                # An adopted engine may have answered an earlier daemon.
                start.ended, start.end_s = "READY", view.since_s
            elif not starting:
                start.ended, start.end_s = "FAILED" if view.state is ModelState.FAILED else "STOPPED", snapshot.at_s
        for name in self._starts.keys() - snapshot.models.keys():
            del self._starts[name]

    def of(self, model: str, disk_bytes_s: float | None = None) -> ModelStart:
        """disk_bytes_s: the rate of the node's disk; None where it is unknown."""
        start = self._starts.get(model)
        if start is None:
            return ModelStart(model, disk_bytes_s)
        seconds = None if start.end_s is None else round(start.end_s - start.began_s, 3)
        return ModelStart(model, disk_bytes_s, start.began_s, seconds, start.ended, start.rows())


def _read_bytes(view: ModelView) -> int | None:
    """Bytes that the loader reports as read; for vLLM's own loader the size of the weights, which its log tells once they are loaded."""
    progress = view.progress
    if progress is None:
        return None
    if progress.read_bytes is not None or progress.weights_gib is None:
        return progress.read_bytes
    return int(progress.weights_gib * GIB)


def _begun(view: ModelView, engine_s: float) -> dict[str, float]:
    """When the phases of the engine's start began, from what its log, its loader and its worker report. engine_s: before it has a rank."""
    progress = view.progress
    engine_s = view.ranks[0].started_at_s if view.ranks else engine_s
    if progress is None:
        return {ENGINE: engine_s}
    began_s = progress.began_s
    # The loader of a format quantizes while it reads; from the cache, and without a format, it only reads.
    weights = QUANTIZE if progress.format not in (None, AS_STORED) and progress.source == "checkpoint" else READ
    begun = {
        ENGINE: engine_s,
        "measuring inputs": began_s.get("calibration"),
        weights: began_s.get("checkpoint", began_s.get("cache", began_s.get("loading"))),
        "compile": began_s.get("warming"),
        "rehearse": began_s.get("rehearsing"),
        "warm-up": began_s.get("sized") if "rehearsing" in began_s else began_s.get("sizing"),
        "first answer": began_s.get("serving"),
    }
    return {name: at_s for name, at_s in begun.items() if at_s is not None}
