"""The files that this process holds open."""

from __future__ import annotations

import os
from pathlib import Path


def descriptors_in(folder: Path) -> list[Path]:
    """The open files below a folder, one for each descriptor."""
    opened = [Path(os.path.realpath(f"/proc/self/fd/{fd}")) for fd in os.listdir("/proc/self/fd")]
    return [path for path in opened if folder in path.parents]
