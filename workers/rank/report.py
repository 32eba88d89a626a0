"""Reads what the processes inside a rank's engine tell of their load and their KV cache, and puts it together with the rank's log.

workers.host.rank_report writes a small JSON file for each process. A missing or torn file is no report, and a missing field is None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Section = Mapping[str, Any]

GIB = 1 << 30
STALE_S = 10.0  # so long without a word: nothing moves, and no rate or ETA is true any more
# Of several ranks' caches of weights one that is being written tells most of now, and one that failed of the end.
CACHE_STATES = ("none", "written", "skipped", "failed", "writing")
# In the order in which they count where the ranks differ: all must be ready, one that refuses or lets vLLM size decides for all.
PHASES = ("refused", "stock", "rehearsing", "sized", "ready")
LIMITED = "limited_by_other_rank"
# The fields of each rank's KV cache; those of its arithmetic are all that may differ.
BY_RANK = (
    "rank", "phase", "source", "pool_bytes", "tokens", "room_bytes", "margin_bytes", "graphs_bytes", "peak_bytes", "weights_bytes",
    "load_peak_bytes", "spare_bytes", "slack_bytes", "error_bytes", LIMITED,
)  # fmt: skip
_OF_ALL = ("bytes_per_token", "sequences", "source_why", "peak_why", "why")
# vLLM's log has whole hundredths of a GiB: of less, a token's share of it says little.
EXACT_GIB = 1.0


def report_path(run_dir: str, rank_id: str) -> Path:
    """The file of a rank's first process. Not *.json: those are the ranks' status files."""
    return Path(run_dir, f"{rank_id}.report")


def remove_reports(run_dir: str, rank_id: str) -> None:
    """Remove the reports of all processes of a rank, and what a writer that was killed has left beside them."""
    path = report_path(run_dir, rank_id)
    for report in (path, *path.parent.glob(f"{path.name}.*"), *path.parent.glob(f".{path.name}.*")):
        report.unlink(missing_ok=True)


def sections(path: Path, name: str) -> list[Section]:
    """The section `load` or `cache` of each process that has told one, by rank."""
    reports = []
    for file in (path, *sorted(path.parent.glob(f"{path.name}.tp*"))):
        try:
            reports.append(json.loads(file.read_bytes()))
        except (OSError, ValueError):
            continue
    return [report[name] for report in reports if name in report]


def load_of(path: Path, now_s: float) -> dict[str, Any]:
    """The loads of a rank's processes as one, by the names of sparkd.state.nouns.Progress; empty where none has told.

    now_s: this node's wall clock. Bytes, units and rates add up, an ETA is the slowest process's and None unless each has one.
    """
    loads = sections(path, "load")
    if not loads:
        return {}
    is_fresh = all(now_s - load["at"] <= STALE_S for load in loads)
    reading = [load for load in loads if load["phase"] == "reading"]
    failed = min((load for load in loads if load["failure"]), key=lambda load: load["at"], default=None)
    etas = [load["eta_s"] for load in reading]
    sums = {name: sum(load[name] for load in loads) for name in _SUMS}
    return {
        **sums,
        "fraction": min(1.0, sums["bytes_done"] / sums["bytes_total"]) if sums["bytes_total"] else None,
        "bytes_total": sums["bytes_total"] or None,
        "units_total": sums["units_total"] or None,
        "bytes_per_s": sums["bytes_per_s"] if is_fresh or not reading else None,
        "eta_s": max(etas) if is_fresh and etas and None not in etas and not failed else None,
        "source": loads[0]["source"],
        "format": loads[0]["format"],
        "cache_state": max((load["cache_state"] for load in loads), key=CACHE_STATES.index),
        "cache_why": next((load["cache_why"] for load in loads if load["cache_why"]), None),
        "failure": failed["failure"] if failed else None,
        "failure_at_s": failed["at"] if failed else None,
        "failure_lasts": bool(failed and failed["failure_lasts"]),
    }


_SUMS = ("bytes_done", "bytes_total", "units_done", "units_total", "bytes_per_s", "read_bytes", "cache_bytes")


def began_of(log: Section, path: Path) -> dict[str, float]:
    """When each part of the start began on this node, seconds since 1970: the log's phases, the loader's sources, the worker's phases.

    The first process tells, and a part is there however short it was.
    """
    told = [section.get("began_s", {}) for name in ("load", "cache") for section in sections(path, name)[:1]]
    return {name: at_s for began_s in (log.get("began_s") or {}, *told) for name, at_s in began_s.items()}


def cache_of(path: Path) -> dict[str, Any]:
    """The KV caches of a rank's processes as one; empty where none has told.

    vLLM gives every process the cache of the one that has the least, so the numbers are that one's (`rank`); slack_bytes is the least of
    all. why: what was refused, why vLLM sized it itself, or which rank decides among several; source_why: which rank had all of them
    rehearse; peak_why: that a batch under load took more than was learned. by_rank: the numbers of each (BY_RANK). Keys are always the
    same, None is unknown.
    """
    caches = sections(path, "cache")
    if not caches:
        return {}
    by_rank = [{name: cache.get(name) for name in BY_RANK} for cache in sorted(caches, key=lambda cache: cache["rank"])]
    deciding = _deciding(caches)
    told = {name: deciding.get(name) for name in (*BY_RANK, *_OF_ALL) if name != LIMITED}
    slack = _least(caches)
    return {**told, "slack_bytes": slack, "ranks": len(caches), "why": told["why"] or _comparison(by_rank, deciding), "by_rank": by_rank}


def growth_of(path: Path) -> int:
    """Bytes that the processes of an engine on this node may still take within their plan. 0 before they are ready, and where vLLM sized
    the cache."""
    return sum(cache.get("growth_bytes") or 0 for cache in sections(path, "cache") if cache["phase"] == "ready")


def over_nodes(answers: Sequence[Section]) -> dict[str, Any]:
    """The answers of cache_of on several nodes, as one: the smallest rank decides, and `why` names it. Empty without any."""
    if len(answers) < 2:
        return dict(answers[0]) if answers else {}
    by_rank = sorted((rank for node in answers for rank in node["by_rank"]), key=lambda rank: rank["rank"])
    limited = {rank["rank"] for rank in by_rank if rank[LIMITED]}
    deciding = _deciding([{**node, LIMITED: node["rank"] in limited} for node in answers])
    return {
        **{name: value for name, value in deciding.items() if name != LIMITED},
        "slack_bytes": _least(answers),
        "ranks": sum(node["ranks"] for node in answers),
        "why": deciding.get("why") if deciding["phase"] in ("refused", "stock") else _comparison(by_rank, deciding),
        "by_rank": by_rank,
    }


def progress_of(log: Section, load: Section, cache: Section) -> dict[str, Any]:
    """A rank's progress: what its log says, and above it what its loader and its worker say.

    Fraction and ETA belong to the phase that the rank is in. A rehearsal is sizing, whatever the log has said by then.
    """
    progress = {**log, **load, "kv": _with_log(log, cache) or None}
    if load and log.get("phase") not in ("starting", "loading"):
        progress |= {"fraction": log.get("fraction"), "eta_s": None}
    elif load and load["bytes_total"]:
        progress["phase"] = "loading"
    if cache.get("tokens") is not None and cache.get("pool_bytes") is not None:
        progress |= {"kv_tokens": cache["tokens"], "kv_gib": cache["pool_bytes"] / GIB}
    if cache.get("phase") in ("rehearsing", "sized") and log.get("phase") in ("starting", "loading", "warming"):
        progress |= {"phase": "sizing", "fraction": None, "eta_s": None}
    return progress


def _with_log(log: Section, cache: Section) -> dict[str, Any]:
    """The cache with what the log of an engine whose cache vLLM sized says of it; as it is of any other."""
    tokens, gib = log.get("kv_tokens"), log.get("kv_gib")
    if tokens is None or cache.get("tokens") is not None or cache.get("phase", "stock") != "stock":
        return dict(cache)
    figures: dict[str, Any] = {"tokens": tokens, "sequences": log.get("kv_requests")}
    if gib is not None:
        figures["pool_bytes"] = round(gib * GIB)
        figures["bytes_per_token"] = figures["pool_bytes"] / tokens if gib >= EXACT_GIB and tokens else None
    unknown = {name: None for name in (*BY_RANK, *_OF_ALL) if name != LIMITED}
    return {**unknown, "phase": "stock", "rank": 0, "ranks": 1, "by_rank": [], **cache, **figures}


def _deciding(caches: Sequence[Section]) -> Section:
    """The first cache that was refused or given up, else the smallest; of equal ones, one that no other limits. Its phase is that of the
    rank that is least far."""
    phase = min((cache["phase"] for cache in caches), key=PHASES.index)
    if phase in ("refused", "stock"):
        return min((cache for cache in caches if cache["phase"] == phase), key=lambda cache: cache.get("at") or 0)
    sized = [cache for cache in caches if cache.get("pool_bytes") is not None]
    smallest = min(sized or caches, key=lambda cache: (cache.get("pool_bytes") or 0, bool(cache.get(LIMITED)), cache["rank"]))
    return {**smallest, "phase": phase}


def _least(caches: Sequence[Section]) -> int | None:
    return min((slack for cache in caches if (slack := cache.get("slack_bytes")) is not None), default=None)


def _comparison(ranks: Sequence[Section], deciding: Section) -> str | None:
    """`rank 1 has the least left (20.10 GiB, the others 22.30 GiB or more)`."""
    others = [rank["room_bytes"] for rank in ranks if rank["rank"] != deciding["rank"] and rank["room_bytes"] is not None]
    if not others or deciding.get("room_bytes") is None or deciding.get("pool_bytes") is None:
        return None
    name, room, least = deciding["rank"], deciding["room_bytes"] / GIB, min(others) / GIB
    if least < room:
        return f"rank {name} has {room:.2f} GiB left and needs the most apart from its cache"
    return f"rank {name} has the least left ({room:.2f} GiB, the others {least:.2f} GiB or more)"
