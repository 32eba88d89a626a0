"""The load file of a rank, read on its node: how far the loader inside the engine is, as it tells itself. Never writes one, never decides.

One small JSON file for each tensor-parallel rank (workers.rank.reports); workers.load.progress writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.rank.reports import number, paths_of, read_object, remove, text

VERSION = 1
PHASES = ("reading", "caching", "done", "failed")
CACHE_STATES = ("none", "writing", "written", "failed", "skipped")
SOURCES = ("checkpoint", "cache", "calibration")

STALE_S = 10.0  # so long without a word: nothing moves, and no rate or ETA is true any more
MESSAGE_CHARS = 500
WHY_CHARS = 200
WORD_CHARS = 64


def load_path(run_dir: str, rank_id: str) -> Path:
    """The file that a rank's loader writes to. Not *.json: those are the ranks' status files."""
    return Path(run_dir, f"{rank_id}.load")


def read_load(path: Path, now_s: float) -> dict[str, Any]:
    """The reports of the loader's ranks put together, by the names of sparkd.state.nouns.Progress; empty where none says anything that can
    be read.

    now_s: this node's wall clock. Bytes, units and rates add up over the ranks, an ETA is the slowest rank's and None unless each has one.
    """
    files = [report for report in map(_read, paths_of(path)) if report is not None]
    if not files:
        return {}
    fresh = all(now_s - report["at"] <= STALE_S for report in files)
    reading = [report for report in files if report["phase"] == "reading"]
    failed = min((report for report in files if report["failure"]), key=lambda report: report["at"], default=None)
    etas = [report["eta_s"] for report in reading]
    total, done = sum(report["bytes_total"] for report in files), sum(report["bytes_done"] for report in files)
    first = files[0]
    return {
        "fraction": min(1.0, done / total) if total else None,
        "bytes_done": done,
        "bytes_total": total or None,
        "units_done": sum(report["units_done"] for report in files),
        "units_total": sum(report["units_total"] for report in files) or None,
        "bytes_per_s": sum(report["bytes_per_s"] for report in files) if fresh or not reading else None,
        "eta_s": max(etas) if fresh and etas and None not in etas and not failed else None,
        "read_bytes": sum(report["read_bytes"] for report in files),
        "source": first["source"],
        "format": first["format"],
        "direct": all(report["direct"] for report in files),
        "cache_state": max((report["cache_state"] for report in files), key=_WORST.index),
        "cache_bytes": sum(report["cache_bytes"] for report in files),
        "cache_why": next((report["cache_why"] for report in files if report["cache_why"]), None),
        "failure": failed["failure"] if failed else None,
        "failure_at_s": failed["at"] if failed else None,
        "failure_lasts": bool(failed and failed["failure_lasts"]),
    }


def together(log: Mapping[str, Any], load: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's progress: what its log says, and above it what its loader says. Fraction and ETA belong to the phase that the rank is in."""
    if not load:
        return dict(log)
    progress = {**log, **load}
    if log.get("phase") not in ("starting", "loading"):
        progress |= {"fraction": log.get("fraction"), "eta_s": log.get("eta_s")}
    elif load["bytes_total"]:
        progress["phase"] = "loading"
    return progress


def remove_load(run_dir: str, rank_id: str) -> None:
    """Every rank's, and what a writer that was killed has left beside them."""
    remove(load_path(run_dir, rank_id))


# Several ranks' caches as one: one that is being written says most of now, one that failed of the end.
_WORST = ("none", "written", "skipped", "failed", "writing")


def _read(path: Path) -> dict[str, Any] | None:
    """One file, every field of the right kind and size."""
    raw = read_object(path)
    if raw is None or raw.get("v") != VERSION or raw.get("phase") not in PHASES:
        return None
    cache, error = _mapping(raw.get("cache")), _mapping(raw.get("error"))
    return {
        "phase": raw["phase"],
        "at": number(raw.get("at")) or 0.0,
        **{name: int(number(raw.get(name)) or 0) for name in ("bytes_done", "bytes_total", "units_done", "units_total", "read_bytes")},
        "bytes_per_s": number(raw.get("bytes_per_s")) or 0.0,
        "eta_s": number(raw.get("eta_s")),
        "source": raw["source"] if raw.get("source") in SOURCES else None,
        "format": text(raw.get("format"), WORD_CHARS),
        "direct": raw.get("direct") is True,
        "cache_state": cache["state"] if cache.get("state") in CACHE_STATES else "none",
        "cache_bytes": int(number(cache.get("bytes")) or 0),
        "cache_why": text(cache.get("why"), WHY_CHARS),
        "failure": (text(error.get("message"), MESSAGE_CHARS) or "The loader failed and did not say why.")
        if raw["phase"] == "failed"
        else None,
        "failure_lasts": error.get("lasting") is True,
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
