"""Writes and reads the guard's incident bundles on a node: one JSON file each, the newest KEPT of them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.host.private_files import write_private

KEPT = 50
# How many characters of the rank's id a bundle's id holds.
RANK_CHARS = 96
TAIL_BYTES = 48 * 1024
TAIL_LINES = 200
INCIDENT_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[A-Za-z0-9._-]{1,96}")
# The keys that a list shows of each incident.
SUMMARY = ("id", "at_s", "node", "model", "rank_id", "phase", "why", "level", "freed_bytes")


def new_id(at_s: float, rank_id: str) -> str:
    """An id that sorts by time (UTC)."""
    return f"{_moment(at_s)}-{rank_id[:RANK_CHARS]}"


def write(folder: Path, bundle: Mapping[str, Any]) -> None:
    """Write the bundle and remove the oldest beyond KEPT. Raises OSError.

    It is on the disk when this returns, because a machine that was short of memory may freeze within seconds.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(folder / f"{bundle['id']}.json", json.dumps(bundle))
    for path in _files(folder)[:-KEPT]:
        path.unlink(missing_ok=True)


def summaries(folder: Path) -> list[dict[str, Any]]:
    """The SUMMARY of each bundle, oldest first. A file that cannot be read is left out."""
    bundles = (read(folder, path.stem) for path in _files(folder))
    return [{name: bundle.get(name) for name in SUMMARY} for bundle in bundles if bundle]


def read(folder: Path, incident_id: str) -> dict[str, Any] | None:
    """The bundle with this id, or None."""
    if not INCIDENT_ID.fullmatch(incident_id):
        return None
    try:
        bundle = json.loads((folder / f"{incident_id}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return bundle if isinstance(bundle, dict) else None


def of_rank(folder: Path, rank_id: str) -> dict[str, Any] | None:
    """The newest bundle of this rank, or None. Reads no other rank's."""
    ids = [path.stem for path in reversed(_files(folder)) if path.stem.endswith(f"-{rank_id[:RANK_CHARS]}")]
    bundles = (read(folder, incident_id) for incident_id in ids)
    return next((bundle for bundle in bundles if bundle and bundle.get("rank_id") == rank_id), None)


def _files(folder: Path) -> list[Path]:
    """The oldest first. A bundle of a time that has yet to come was written before the clock was set back."""
    now = _moment(time.time())
    paths = (path for path in folder.glob("*.json") if INCIDENT_ID.fullmatch(path.stem))
    return sorted(paths, key=lambda path: (path.stem[: len(now)] <= now, path.stem))


def _moment(at_s: float) -> str:
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(at_s))
