"""The report of a rank's KV cache, read on its node: how it was sized, as the worker inside the engine tells it. Never writes one.

One small JSON file for each tensor-parallel rank (workers.told); workers.kv.report writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workers.told import number, paths_of, read_object, remove, signed, text

VERSION = 1
# In the order in which they count where the ranks differ: all must be ready, one that refuses or lets vLLM size decides for all.
PHASES = ("refused", "stock", "rehearsing", "sized", "ready")
SOURCES = ("rehearsal", "profile", "plenty")
MAX_RANK = 9999
# The arithmetic in words, with its cures.
WHY_CHARS = 1000
GIB = 1 << 30
_SIZES = ("pool_bytes", "tokens", "room_bytes", "margin_bytes", "graphs_bytes", "peak_bytes", "weights_bytes")
_SHARES = ("sequences", "bytes_per_token")
_DIFFERENCES = ("spare_bytes", "slack_bytes", "error_bytes")


def kv_path(run_dir: str, rank_id: str) -> Path:
    """Where a rank's worker is told to write. Not *.json: those are the ranks' status files."""
    return Path(run_dir, f"{rank_id}.kv")


def read_kv(path: Path) -> dict[str, Any]:
    """What the workers of a rank's engine say together; empty where none says anything that can be read.

    vLLM gives every rank the cache of the one that has the least, so the numbers are that one's (`rank`); slack_bytes is the least of
    all. why: what was refused, why vLLM sized it itself, or which rank decides among several. Keys are always the same, None is unknown.
    """
    files = [told for told in map(_read, paths_of(path)) if told is not None]
    if not files:
        return {}
    phase = min((told["phase"] for told in files), key=PHASES.index)
    deciding = _deciding(files, phase)
    slack = [told["slack_bytes"] for told in files if told["slack_bytes"] is not None]
    return {
        **{name: value for name, value in deciding.items() if name not in ("at", "limited")},
        "phase": phase,
        "slack_bytes": min(slack) if slack else None,
        "ranks": len(files),
        "why": deciding["why"] or _comparison(files, deciding),
    }


def with_kv(progress: Mapping[str, Any], kv: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's progress with what its worker says of the cache. What is rehearsed is sizing, whatever the log has said by then."""
    found = {**progress, "kv": dict(kv) or None}
    if kv.get("tokens") is not None and kv.get("pool_bytes") is not None:
        found |= {"kv_tokens": kv["tokens"], "kv_gib": kv["pool_bytes"] / GIB}
    if kv.get("phase") in ("rehearsing", "sized") and progress.get("phase") in ("starting", "loading", "warming"):
        found |= {"phase": "sizing", "fraction": None, "eta_s": None}
    return found


def remove_kv(run_dir: str, rank_id: str) -> None:
    """Every rank's, and what a writer that was killed has left beside them."""
    remove(kv_path(run_dir, rank_id))


def _deciding(files: Sequence[dict[str, Any]], phase: str) -> dict[str, Any]:
    """The first that refused or gave up, else the smallest cache; once vLLM has made them equal, that of the rank that nobody limits."""
    if phase in ("refused", "stock"):
        return min((told for told in files if told["phase"] == phase), key=lambda told: told["at"])
    sized = [told for told in files if told["pool_bytes"] is not None]
    return min(sized or files, key=lambda told: (told["pool_bytes"] or 0, told["limited"], told["rank"]))


def _comparison(files: Sequence[dict[str, Any]], deciding: Mapping[str, Any]) -> str | None:
    """`rank 1 has the least left (20.10 GiB, the others 22.30 GiB or more)`."""
    others = [told["room_bytes"] for told in files if told is not deciding and told["room_bytes"] is not None]
    if not others or deciding["room_bytes"] is None or deciding["pool_bytes"] is None:
        return None
    name, room, least = deciding["rank"], deciding["room_bytes"] / GIB, min(others) / GIB
    if least < room:
        return f"rank {name} has {room:.2f} GiB left and needs the most beside its cache"
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
        "limited": raw.get("limited_by_other_rank") is True,
        "source": raw["source"] if raw.get("source") in SOURCES else None,
        **{name: _whole(number(raw.get(name))) for name in _SIZES},
        **{name: number(raw.get(name)) for name in _SHARES},
        **{name: _whole(signed(raw.get(name))) for name in _DIFFERENCES},
        "why": text(raw.get("why"), WHY_CHARS) or refused,
    }


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
