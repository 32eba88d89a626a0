"""Owns how each model's last start went: its phases one after another, as the supervisor's looks show them. Never decides.

A start is kept in memory only: after a restart of the daemon it is unknown until the model starts again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sparkd.hardware import GIB
from sparkd.state.nouns import STARTING, ModelState
from sparkd.state.snapshot import ModelView, Snapshot

# In the order in which a start goes through them; it may leave some out, and never goes back. A loader that quantizes reads while it does,
# so all bytes of its load are those of `quantize`, and there is no `read`.
PHASES = MEMORY, ENGINE, MEASURE, READ, QUANTIZE, COMPILE, REHEARSE, GRAPHS, ANSWER = (
    *("memory back", "engine", "measuring inputs", "read", "quantize"),
    *("compile", "rehearse", "graphs", "first answer"),
)

# The loader's name of weights that it only reads.
AS_STORED = "bf16"


@dataclass(slots=True)
class _Phase:
    """Times are wall-clock seconds. read_bytes: from the disk."""

    name: str
    begin_s: float
    end_s: float | None = None
    read_bytes: int | None = None

    def to_dict(self, began_s: float) -> dict[str, Any]:
        seconds = None if self.end_s is None else self.end_s - self.begin_s
        rate = self.read_bytes / seconds if self.read_bytes and seconds else None
        return {
            "name": self.name,
            "begin_s": round(self.begin_s - began_s, 3),
            "seconds": None if seconds is None else round(seconds, 3),
            "bytes": self.read_bytes,
            "bytes_per_s": rate,
        }


@dataclass(slots=True)
class _Start:
    began_s: float
    phases: list[_Phase] = field(default_factory=list)
    ended: str | None = None
    end_s: float | None = None

    def look(self, phase: str, read_bytes: int | None, now_s: float) -> None:
        last = self.phases[-1] if self.phases else None
        if phase in (MEASURE, QUANTIZE) and last is not None and last.name == READ:
            last.name = phase  # its loader had not said yet what it does
        if last is None or PHASES.index(phase) > PHASES.index(last.name):
            self._close(now_s)
            last = _Phase(phase, now_s)
            self.phases.append(last)
        # The last bytes are known, and vLLM's own loader tells any, when the reading has ended.
        reading = next((each for each in reversed(self.phases) if each.name in (READ, QUANTIZE)), None)
        if reading is not None and read_bytes is not None:
            reading.read_bytes = read_bytes

    def end(self, how: str, now_s: float) -> None:
        self._close(now_s)
        self.ended, self.end_s = how, now_s

    def _close(self, now_s: float) -> None:
        if self.phases and self.phases[-1].end_s is None:
            self.phases[-1].end_s = now_s


class Starts:
    """One start for each model, the last."""

    def __init__(self) -> None:
        self._starts: dict[str, _Start] = {}

    def look(self, snapshot: Snapshot) -> None:
        """With each look of the supervisor, which come each quarter of a second while a model starts."""
        for name, view in snapshot.models.items():
            start = self._starts.get(name)
            if view.state in STARTING:
                # An adopted start began before this daemon's first observation.
                if start is None or start.ended is not None:
                    start = self._starts[name] = _Start(snapshot.at_s)
                start.look(_phase_of(view), _read_bytes(view), snapshot.at_s)
            elif start is not None and start.ended is None:
                start.end("READY" if view.state is ModelState.READY else _end_of(view), snapshot.at_s)
        for name in self._starts.keys() - snapshot.models.keys():
            del self._starts[name]

    def of(self, model: str, disk_bytes_s: float | None = None) -> dict[str, Any]:
        """See sparkd.admin.page_answers.StartAnswer. disk_bytes_s: the rate of the node's disk; if it is unknown, that of this load's
        reading stands for it."""
        start = self._starts.get(model)
        if start is None:
            return {"model": model, "began_s": None, "seconds": None, "ended": None, "phases": [], "disk_bytes_per_s": disk_bytes_s}
        phases = [phase.to_dict(start.began_s) for phase in start.phases]
        return {
            "model": model,
            "began_s": start.began_s,
            "seconds": None if start.end_s is None else round(start.end_s - start.began_s, 3),
            "ended": start.ended,
            "phases": phases,
            "disk_bytes_per_s": disk_bytes_s or max(filter(None, (phase["bytes_per_s"] for phase in phases)), default=None),
        }


def _read_bytes(view: ModelView) -> int | None:
    """Bytes that the loader reports as read; for vLLM's own loader the size of the weights, which its log tells once they are loaded."""
    progress = view.progress
    if progress is None:
        return None
    if progress.read_bytes is not None or progress.weights_gib is None:
        return progress.read_bytes
    return int(progress.weights_gib * GIB)


def _end_of(view: ModelView) -> str:
    return "FAILED" if view.state is ModelState.FAILED else "STOPPED"


def _phase_of(view: ModelView) -> str:
    """The phase of a start, from the model's state and the progress that the engine's log, loader and worker report."""
    progress = view.progress
    if view.state is ModelState.PLANNED:
        return MEMORY
    if progress is None:
        return ENGINE
    if progress.server_up or progress.phase == "serving":
        return ANSWER
    if progress.phase == "starting":
        return ENGINE
    if progress.phase == "loading" and progress.source == "calibration":
        return MEASURE
    if progress.phase == "loading":
        # The loader of a format quantizes while it reads; from the cache, and without a format, it only reads.
        return QUANTIZE if progress.format not in (None, AS_STORED) and progress.source == "checkpoint" else READ
    if progress.phase == "warming":
        return COMPILE
    return REHEARSE if progress.kv is not None and progress.kv.get("phase") == "rehearsing" else GRAPHS
