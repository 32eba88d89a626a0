"""Where the hub's local cache has a model. Never fetches anything, never looks into a model's folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PLACES = ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME")


def snapshot_of(hub_id: str, revision: str | None, environ: Mapping[str, str]) -> Path | None:
    """The folder of a hub id in the local cache (huggingface_hub, "Understand caching"); None where it is not there. Fetches nothing."""
    folder = hub_cache(environ) / f"models--{hub_id.replace('/', '--')}"
    wanted = revision or "main"
    try:
        commit = (folder / "refs" / wanted).read_text().strip()
    except OSError:
        commit = wanted
    snapshot = folder / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() else None


def hub_cache(environ: Mapping[str, str]) -> Path:
    """The folder of the local cache, which need not be there."""
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()


def cache_places(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that say where it is, and nothing else of an environment that may hold secrets."""
    return {name: environ[name] for name in PLACES if name in environ}
