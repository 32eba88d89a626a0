"""What a user means by MODEL on a command line: a folder or a hub id, a name for it, where a hub id lies. Never looks into the folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

CONFIG_PATH = Path("/etc/sparkd/sparkd.yaml")
_UNSAFE = re.compile(r"[^a-z0-9._-]+")
_FOLDER_SIGNS = ("/", "./", "../", "~")


def source_of(text: str) -> str:
    """An absolute folder where one is meant or is there, else the text as a hub id."""
    folder = Path(text).expanduser()
    if text.startswith(_FOLDER_SIGNS) or text in (".", "..") or (text and folder.is_dir()):
        return os.path.abspath(folder)
    return text


def name_of(source: str) -> str:
    """`/models/SmolLM2-135M-Instruct` and `HuggingFaceTB/SmolLM2-135M-Instruct` are smollm2-135m-instruct."""
    last = source.rstrip("/").rpartition("/")[2].lower()
    return _UNSAFE.sub("-", last).strip("-._")[:128] or "model"


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
