"""The bundles that the guard leaves on a node: one JSON file each, the newest of them kept. Never decides what is an incident."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEPT = 50
# The characters of a rank's id that a bundle's id has.
RANK_CHARS = 96
TAIL_BYTES = 48 * 1024
TAIL_LINES = 200
INCIDENT_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[A-Za-z0-9._-]{1,96}")
# The keys that a list shows of each incident.
SUMMARY = ("id", "at_s", "node", "model", "rank_id", "phase", "why", "level", "freed_bytes")


def new_id(at_s: float, rank_id: str) -> str:
    """Sorts by time, which is UTC."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(at_s))}-{rank_id[:RANK_CHARS]}"


def write(folder: Path, bundle: Mapping[str, Any]) -> None:
    """Mode 0600, whole or not at all; the oldest beyond KEPT go. Raises OSError.

    On the disk when this returns: a machine that was short of memory may stop for good within seconds, and this is what it leaves.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = folder / f".{bundle['id']}.{os.getpid()}"
    try:
        with open(
            os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "w", encoding="utf-8"
        ) as file:
            json.dump(bundle, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, folder / f"{bundle['id']}.json")
        _sync(folder)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    for path in _files(folder)[:-KEPT]:
        path.unlink(missing_ok=True)


def summaries(folder: Path) -> list[dict[str, Any]]:
    """Oldest first; a file that cannot be read is left out."""
    found = (read(folder, path.stem) for path in _files(folder))
    return [{name: bundle.get(name) for name in SUMMARY} for bundle in found if bundle]


def read(folder: Path, incident_id: str) -> dict[str, Any] | None:
    """None where there is none of that id."""
    if not INCIDENT_ID.fullmatch(incident_id):
        return None
    try:
        bundle = json.loads((folder / f"{incident_id}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return bundle if isinstance(bundle, dict) else None


def of_rank(folder: Path, rank_id: str) -> dict[str, Any] | None:
    """The newest bundle of this rank; None where there is none. Reads no other rank's."""
    found = (read(folder, path.stem) for path in reversed(_files(folder)) if path.stem.endswith(f"-{rank_id[:RANK_CHARS]}"))
    return next((bundle for bundle in found if bundle and bundle.get("rank_id") == rank_id), None)


def _sync(folder: Path) -> None:
    """The name of a file is its folder's content, and as safe as that (fsync(2))."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.json") if INCIDENT_ID.fullmatch(path.stem))
