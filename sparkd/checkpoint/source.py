"""The meaning of MODEL on a command line: a folder or a hub id, a name for it, where a hub id lies."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from workers.host.hub_cache import cache_places, hub_cache, snapshot_of

__all__ = ["CONFIG_PATH", "FOLDER_SIGNS", "folder_of", "hub_cache", "name_of", "snapshot_of", "source_of"]

CONFIG_PATH = Path("/etc/sparkd/sparkd.yaml")
_UNSAFE = re.compile(r"[^a-z0-9._-]+")
# The beginnings of a folder, which no model's name has.
FOLDER_SIGNS = ("/", "./", "../", "~")


def source_of(text: str) -> str:
    """An absolute folder where one is meant or is there, else the text as a hub id."""
    # As in the shell, the ~ of an unknown user stays as it is.
    folder = os.path.expanduser(text)
    if text.startswith(FOLDER_SIGNS) or text in (".", "..") or (text and os.path.isdir(folder)):
        return os.path.abspath(folder)
    return text


def folder_of(source: str, revision: str | None, environ: Mapping[str, str]) -> str | None:
    """Where the files of a folder or a hub id are for an engine of this machine; None where they are not.

    environ: the engine's own, which overrides what it inherits.
    """
    if source.startswith("/"):
        return source
    places = {**cache_places(os.environ), **cache_places(environ)}
    found = snapshot_of(source, revision, places)
    return None if found is None else str(found)


def name_of(source: str) -> str:
    """`/models/SmolLM2-135M-Instruct` and `HuggingFaceTB/SmolLM2-135M-Instruct` are smollm2-135m-instruct."""
    last = source.rstrip("/").rpartition("/")[2].lower()
    return _UNSAFE.sub("-", last).strip("-._")[:128] or "model"
