"""Reads facts of a node besides its memory: its name, its uptime, and the free space on a folder's disk.

psutil's boot time moves with the clock, and the uptime would move with it.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any


def sample(proc: Path, folder: Path) -> dict[str, Any]:
    """{"host", "uptime_s", "disk_total_bytes", "disk_free_bytes"}; None for a value that cannot be read.

    disk_free_bytes: free to a user who is not root. Blocks as long as the folder's file system does.
    """
    facts: dict[str, Any] = {"host": socket.gethostname(), "uptime_s": None, "disk_total_bytes": None, "disk_free_bytes": None}
    try:
        facts["uptime_s"] = float((proc / "uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        facts["uptime_s"] = None
    try:
        disk = os.statvfs(folder)
    except OSError:
        return facts
    return facts | {"disk_total_bytes": disk.f_blocks * disk.f_frsize, "disk_free_bytes": disk.f_bavail * disk.f_frsize}
