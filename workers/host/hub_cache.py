"""Finds the paths of models in the hub's local cache."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from workers.host import regular_file

PLACES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")

# Spellings of a branch, a tag, refs/pr/1 or a commit, and of OWNER/NAME, that cannot lead outside the cache's folder.
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,127}(?:/[A-Za-z0-9_][A-Za-z0-9._+-]{0,127}){0,7}")
_HUB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}(?:/[A-Za-z0-9_][A-Za-z0-9._-]{0,95})?")
_COMMIT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def is_revision(text: str) -> bool:
    """Whether the text can be the name of a revision, and cannot be a path outside the cache."""
    return _REVISION.fullmatch(text) is not None and ".." not in text


def is_hub_id(text: str) -> bool:
    """Whether the text can be OWNER/NAME, or NAME alone as for old models."""
    return _HUB_ID.fullmatch(text) is not None and ".." not in text


def is_commit(text: str) -> bool:
    """Whether the text can be the name of a folder below snapshots/."""
    return _COMMIT.fullmatch(text) is not None and ".." not in text


def snapshot_of(hub_id: str, revision: str | None, environ: Mapping[str, str]) -> Path | None:
    """The folder of a hub id in the local cache (huggingface_hub, "Understand caching"). Fetches nothing.

    None where the model is not in the cache, or a name would lead outside of it.
    """
    if not is_hub_id(hub_id) or not is_revision(revision or "main"):
        return None
    folder = hub_cache(environ) / f"models--{hub_id.replace('/', '--')}"
    wanted = revision or "main"
    try:
        commit = regular_file.read(folder / "refs" / wanted).decode().strip()
    except (OSError, ValueError):
        commit = wanted
    snapshot = folder / "snapshots" / commit
    return snapshot if is_commit(commit) and snapshot.is_dir() else None


def hub_cache(environ: Mapping[str, str]) -> Path:
    """The folder of the local cache, which need not be there, by the library's own rules (huggingface_hub/constants.py)."""
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    folder = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(folder)).expanduser()


def cache_places(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that set the cache's place, and no other of an environment that may hold secrets."""
    return {name: environ[name] for name in PLACES if name in environ}
