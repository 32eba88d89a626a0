"""What a node is besides its memory."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from workers.host.machine import sample


def test_this_machine(tmp_path: Path) -> None:
    facts = sample(Path("/proc"), tmp_path)
    disk = os.statvfs(tmp_path)
    assert facts["host"] == socket.gethostname()
    assert 0 < facts["uptime_s"] <= float(Path("/proc/uptime").read_text().split()[0])
    assert facts["disk_total_bytes"] == disk.f_blocks * disk.f_frsize
    assert 0 <= facts["disk_free_bytes"] <= facts["disk_total_bytes"]


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "uptime").write_text("soon")
    facts = sample(tmp_path, tmp_path / "nowhere")
    assert (facts["uptime_s"], facts["disk_total_bytes"], facts["disk_free_bytes"]) == (None, None, None)
