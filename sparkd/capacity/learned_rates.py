"""Owns the rates of this node that its benches measured, one file. A plan for this node takes them in place of a data sheet's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from sparkd.errors import StateError
from sparkd.hardware import Hardware
from workers.host.private_files import write_private

LearnedName = Literal["bandwidth_bytes_s", "disk_bytes_s"]
NAMES: tuple[LearnedName, ...] = ("bandwidth_bytes_s", "disk_bytes_s")
FILE = "learned-rates.json"


def learned_rates(state_dir: Path) -> dict[LearnedName, float]:
    """Bytes a second by name. A file that cannot be read is as one that is not there: the next bench writes it again."""
    with suppress(OSError, ValueError):
        kept = json.loads((state_dir / FILE).read_text(encoding="utf-8"))
        if isinstance(kept, dict):
            return {name: float(kept[name]) for name in NAMES if isinstance(kept.get(name), int | float) and kept[name] > 0}
    return {}


def learn(state_dir: Path, rates: Mapping[LearnedName, float]) -> None:
    """Keep these rates in place of earlier ones; the others stay. Raises StateError where the disk is full."""
    if rates:
        path = state_dir / FILE
        try:
            write_private(path, json.dumps({**learned_rates(state_dir), **rates}))
        except OSError as error:
            raise StateError(f"The measured rates cannot be written to {path}: {error.strerror or error}. Free space there.") from None


def with_learned_rates(hardware: Hardware, rates: Mapping[LearnedName, float]) -> Hardware:
    return replace(
        hardware,
        bandwidth_bytes_s=rates.get("bandwidth_bytes_s", hardware.bandwidth_bytes_s),
        disk_bytes_s=rates.get("disk_bytes_s", hardware.disk_bytes_s),
        learned=tuple(sorted(rates)),
    )
