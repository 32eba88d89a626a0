"""Keeps a registry of recipes as if it had been fetched."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from sparkd.recipes.registry import FOLDER, Registry
from workers.host.private_files import private_folder, write_private


def keep_registry(state_dir: Path, registry: Registry) -> None:
    private_folder(state_dir / FOLDER)
    write_private(state_dir / FOLDER / f"{registry.name}.json", json.dumps(asdict(registry)))
