"""Engines on this node that sparkd did not start: other vLLMs, and whatever else holds GPU memory. Never ends one, never reads its command
line or environment, which a process that a driver holds does not give."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from workers.guard.consumers import DEVICE_COMMAND, DEVICE_TIMEOUT_S, MIB, device_bytes
from workers.host import processes
from workers.host.bounded_child import ask, stuck
from workers.rank.status import living_workers

# A desktop and a browser hold less; a model that matters holds more.
DEVICE_LEAST_BYTES = 512 * MIB
# systemd's ProtectProc=invisible hides them from /proc, and nvidia-smi asks the driver.
HIDDEN = "another user's process"


def foreign(run_dir: str, *, ask_device: bool = True) -> list[dict[str, Any]]:
    """{"pid", "name", "vllm", "bytes"} of each, the largest first; processes of one engine are one. bytes: anonymous and GPU memory.
    run_dir: of this node's ranks."""
    stats = processes.table()
    device = _device() if ask_device else {}
    engines = {pid for pid, stat in stats.items() if stat.name.startswith(processes.VLLM_NAMES)}
    suspects = engines | {pid for pid in stats if device.get(pid, 0) >= DEVICE_LEAST_BYTES}
    suspects -= processes.of_ranks(stats, living_workers(run_dir))
    roots = [pid for pid in suspects if not _parents(pid, stats) & suspects]
    rows = []
    for pid in roots:
        family = {pid} | processes.descendants({pid}, stats)
        held = sum(processes.anonymous_bytes(member) + device.get(member, 0) for member in family)
        rows.append({"pid": pid, "name": stats[pid].name, "vllm": bool(family & engines), "bytes": held})
    rows += [{"pid": pid, "name": HIDDEN, "vllm": False, "bytes": size} for pid, size in device.items() if _is_hidden(pid, size, stats)]
    return sorted(rows, key=lambda row: (-row["bytes"], row["pid"]))


def _device() -> dict[int, int]:
    if stuck():
        return {}
    answer = ask(DEVICE_COMMAND, DEVICE_TIMEOUT_S)
    return device_bytes(answer.text.splitlines()) if answer.trouble is None else {}


def _is_hidden(pid: int, size: int, stats: Mapping[int, processes.Stat]) -> bool:
    """It holds GPU memory and lives, and /proc does not show it. One that has just ended may hold some for a minute yet."""
    if size < DEVICE_LEAST_BYTES or pid in stats or pid in processes.table():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _parents(pid: int, stats: Mapping[int, processes.Stat]) -> set[int]:
    ancestors: set[int] = set()
    while (above := stats.get(pid)) is not None and above.parent not in ancestors and above.parent > 1:
        pid = above.parent
        ancestors.add(pid)
    return ancestors
