"""The report of a rank's KV cache, read on its node: how it was sized, as the worker inside the engine tells it. Never writes one.

One small JSON file for each tensor-parallel rank (workers.rank.reports); workers.kv.report writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workers.rank.reports import number, paths_of, read_object, remove, signed, text

VERSION = 1
# In the order in which they count where the ranks differ: all must be ready, one that refuses or lets vLLM size decides for all.
PHASES = ("refused", "stock", "rehearsing", "sized", "ready")
SOURCES = ("rehearsal", "profile", "limit")
MAX_RANK = 9999
# The arithmetic in words, with its cures.
WHY_CHARS = 1000
GIB = 1 << 30
_SIZES = ("pool_bytes", "tokens", "room_bytes", "margin_bytes", "graphs_bytes", "peak_bytes", "weights_bytes", "load_peak_bytes")
_SHARES = ("sequences", "bytes_per_token")
_DIFFERENCES = ("spare_bytes", "slack_bytes", "error_bytes")
LIMITED = "limited_by_other_rank"
# For the guard of the node alone.
GROWTH = "growth_bytes"
# vLLM's log has whole hundredths of a GiB: of less, a token's share of it says little.
EXACT_GIB = 1.0
_TOLD_OF_ALL = ("bytes_per_token", "sequences", "source_why", "peak_why", "why")
# The fields of each rank; those of its arithmetic are all that may differ.
BY_RANK = ("rank", "phase", "source", *_SIZES, *_DIFFERENCES, LIMITED)


def kv_path(run_dir: str, rank_id: str) -> Path:
    """The file that a rank's worker writes to. Not *.json: those are the ranks' status files."""
    return Path(run_dir, f"{rank_id}.kv")


def read_kv(path: Path) -> dict[str, Any]:
    """The reports of the workers of a rank's engine put together; empty where none says anything that can be read.

    vLLM gives every rank the cache of the one that has the least, so the numbers are that one's (`rank`); slack_bytes is the least of
    all. why: what was refused, why vLLM sized it itself, or which rank decides among several; source_why: which rank had all of them
    rehearse; peak_why: that a batch under load took more than was learned. by_rank: the numbers of each (BY_RANK). Keys are always the
    same, None is unknown.
    """
    files = [report for report in map(_read, paths_of(path)) if report is not None]
    if not files:
        return {}
    phase = min((report["phase"] for report in files), key=PHASES.index)
    deciding = _deciding(files, phase)
    by_rank = [{name: report[name] for name in BY_RANK} for report in sorted(files, key=lambda report: report["rank"])]
    return {
        **{name: value for name, value in deciding.items() if name not in ("at", LIMITED, GROWTH)},
        "phase": phase,
        "slack_bytes": _least([report["slack_bytes"] for report in files]),
        "ranks": len(files),
        "why": deciding["why"] or _comparison(by_rank, deciding),
        "by_rank": by_rank,
    }


def growth_of(path: Path) -> int:
    """Bytes that the ranks of an engine on this node may still take within their plan. 0 before they are ready, and where vLLM sized the
    cache."""
    ready = [report for report in map(_read, paths_of(path)) if report is not None and report["phase"] == "ready"]
    return sum(report[GROWTH] or 0 for report in ready)


def over_nodes(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The answers of read_kv on several nodes, as one: the smallest rank decides, and `why` names it. Empty without any."""
    if len(answers) < 2:
        return dict(answers[0]) if answers else {}
    by_rank = sorted((rank for node in answers for rank in node.get("by_rank") or ()), key=lambda rank: rank["rank"])
    phase = min((_phase(node) for node in answers), key=PHASES.index)
    those = [node for node in answers if _phase(node) == phase] if phase in ("refused", "stock") else list(answers)
    limited = {rank["rank"] for rank in by_rank if rank[LIMITED]}
    sized = [node for node in those if node.get("pool_bytes") is not None] or those
    deciding = min(sized, key=lambda node: (node.get("pool_bytes") or 0, node.get("rank") in limited, node.get("rank") or 0))
    return {
        **deciding,
        "phase": phase,
        "slack_bytes": _least([node.get("slack_bytes") for node in answers]),
        "ranks": sum(node.get("ranks") or 1 for node in answers),
        "why": deciding.get("why") if phase in ("refused", "stock") else _comparison(by_rank, deciding),
        "by_rank": by_rank,
    }


def with_kv(progress: Mapping[str, Any], kv: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's progress with what its worker says of the cache, or where vLLM sized it, its log. A rehearsal is sizing, whatever the
    log has said by then."""
    merged = {**progress, "kv": _of_log(progress, kv) or None}
    if kv.get("tokens") is not None and kv.get("pool_bytes") is not None:
        merged |= {"kv_tokens": kv["tokens"], "kv_gib": kv["pool_bytes"] / GIB}
    if kv.get("phase") in ("rehearsing", "sized") and progress.get("phase") in ("starting", "loading", "warming"):
        merged |= {"phase": "sizing", "fraction": None, "eta_s": None}
    return merged


def _of_log(progress: Mapping[str, Any], kv: Mapping[str, Any]) -> dict[str, Any]:
    """kv with what the log of an engine whose cache vLLM sized says of it; as it is of any other."""
    tokens, gib = progress.get("kv_tokens"), progress.get("kv_gib")
    if tokens is None or kv.get("tokens") is not None or kv.get("phase", "stock") != "stock":
        return dict(kv)
    figures: dict[str, Any] = {"tokens": tokens, "sequences": progress.get("kv_requests")}
    if gib is not None:
        figures["pool_bytes"] = round(gib * GIB)
        figures["bytes_per_token"] = figures["pool_bytes"] / tokens if gib >= EXACT_GIB and tokens else None
    empty: dict[str, Any] = {
        **dict.fromkeys((*(name for name in BY_RANK if name != LIMITED), *_TOLD_OF_ALL)),
        "phase": "stock",
        "rank": 0,
        "ranks": 1,
        "by_rank": [],
    }
    return {**empty, **kv, **figures}


def remove_kv(run_dir: str, rank_id: str) -> None:
    """Every rank's, and what a writer that was killed has left beside them."""
    remove(kv_path(run_dir, rank_id))


def _deciding(files: Sequence[dict[str, Any]], phase: str) -> dict[str, Any]:
    """The report of the first rank that refused or gave up, else that of the smallest cache; of equal ones, a rank that no other limits."""
    if phase in ("refused", "stock"):
        return min((report for report in files if report["phase"] == phase), key=lambda report: report["at"])
    sized = [report for report in files if report["pool_bytes"] is not None]
    return min(sized or files, key=lambda report: (report["pool_bytes"] or 0, report[LIMITED], report["rank"]))


def _phase(node: Mapping[str, Any]) -> str:
    """A phase of an agent of another release may have another name: then nothing is ready yet."""
    return node["phase"] if node.get("phase") in PHASES else "rehearsing"


def _least(values: Sequence[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _comparison(ranks: Sequence[Mapping[str, Any]], deciding: Mapping[str, Any]) -> str | None:
    """`rank 1 has the least left (20.10 GiB, the others 22.30 GiB or more)`."""
    others = [report["room_bytes"] for report in ranks if report["rank"] != deciding.get("rank") and report["room_bytes"] is not None]
    if not others or deciding.get("room_bytes") is None or deciding.get("pool_bytes") is None:
        return None
    name, room, least = deciding["rank"], deciding["room_bytes"] / GIB, min(others) / GIB
    if least < room:
        return f"rank {name} has {room:.2f} GiB left and needs the most apart from its cache"
    return f"rank {name} has the least left ({room:.2f} GiB, the others {least:.2f} GiB or more)"


def _read(path: Path) -> dict[str, Any] | None:
    """One file, every field of the right kind and size."""
    raw = read_object(path)
    if raw is None or raw.get("v") != VERSION or raw.get("phase") not in PHASES:
        return None
    rank = number(raw.get("rank")) or 0
    refused = "The KV cache was refused and its worker did not say why." if raw["phase"] == "refused" else None
    return {
        "phase": raw["phase"],
        "at": number(raw.get("at")) or 0.0,
        "rank": int(rank) if rank <= MAX_RANK else 0,
        LIMITED: raw.get("limited_by_other_rank") is True,
        "source": raw["source"] if raw.get("source") in SOURCES else None,
        **{name: _whole(number(raw.get(name))) for name in (*_SIZES, GROWTH)},
        **{name: number(raw.get(name)) for name in _SHARES},
        **{name: _whole(signed(raw.get(name))) for name in _DIFFERENCES},
        "source_why": text(raw.get("source_why"), WHY_CHARS),
        "peak_why": text(raw.get("peak_why"), WHY_CHARS),
        "why": text(raw.get("why"), WHY_CHARS) or refused,
    }


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
