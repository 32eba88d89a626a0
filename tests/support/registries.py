"""Keeps a registry of recipes as if it had been fetched."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from sparkd.recipes.registry import Registry
from sparkd.state.documents import Documents


def keep_registry(state_dir: Path, registry: Registry) -> None:
    Documents(state_dir, "registries", dict).put(registry.name, asdict(registry))
