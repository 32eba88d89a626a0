"""Engines on this node that sparkd did not start: other vLLMs, and whatever else holds GPU memory. Never ends one, never reads a prompt.

A rank of sparkd's carries its mark in its environment (workers.rank.command), whichever daemon started it; so does what descends from it.
Command lines and environments are read by a program of its own: one of a process that a driver holds does not come.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workers.guard.consumers import DEVICE_COMMAND, DEVICE_TIMEOUT_S, MIB, device_bytes
from workers.host import processes
from workers.host.bounded_child import ask, stuck
from workers.host.interpreter import PACKAGE_DIR
from workers.host.processes import RANK_ID_VARIABLE

log = logging.getLogger("sparkd.agent")

# Command lines of vLLM's front ends, titles of its engine cores and workers (vllm/utils/system_utils.py, set_process_title), of Ray's.
_ENGINE = re.compile(
    rb"vllm\.entrypoints\.(openai\.api_server|cli\.main|grpc_server)|(^|/)vllm\0serve\b|^VLLM::|^ray::RayWorker(Proc|Wrapper)"
)
# A desktop and a browser hold less; a model that matters holds more.
DEVICE_LEAST_BYTES = 512 * MIB
# For every process of a machine, on a slow one.
LIMIT_S = 10.0
# systemd's ProtectProc=invisible hides them from /proc, and nvidia-smi asks the driver.
HIDDEN = "another user's process"


def foreign(proc: Path, *, ask_device: bool) -> list[dict[str, Any]]:
    """See `found`; empty where that did not come within DEVICE_TIMEOUT_S and LIMIT_S."""
    program = f"import sys; sys.path[:0] = [{PACKAGE_DIR!r}]; from {__name__} import main; main(sys.argv[1:])"
    command = [sys.executable, "-P", "-S", "-c", program, str(proc), *(["device"] if ask_device else [])]
    answer = ask(command, DEVICE_TIMEOUT_S + LIMIT_S)
    if answer.trouble is not None:
        log.warning("engines that sparkd did not start could not be looked for: %s", answer.trouble)
        return []
    rows: list[dict[str, Any]] = json.loads(answer.text)
    return rows


def main(argv: Sequence[str]) -> None:
    sys.stdout.write(json.dumps(found(Path(argv[0]), ask_device=len(argv) > 1)))


def found(proc: Path = Path("/proc"), *, ask_device: bool = True) -> list[dict[str, Any]]:
    """{"pid", "name", "vllm", "bytes"} of each, the largest first; processes of one engine are one. bytes: anonymous and GPU memory."""
    stats = processes.table()
    device = _device() if ask_device else {}
    commands = {pid: _read(proc, pid, "cmdline") for pid in stats}
    engines = {pid for pid, command in commands.items() if _ENGINE.search(command)}
    suspects = engines | {pid for pid in stats if device.get(pid, 0) >= DEVICE_LEAST_BYTES}
    ours = {pid for pid in stats if pid in _with_parents(suspects, stats) and _is_ours(proc, pid)}
    suspects -= ours | processes.descendants(ours, stats)
    roots = [pid for pid in suspects if not _parents(pid, stats) & suspects]
    rows = []
    for pid in roots:
        family = {pid} | processes.descendants({pid}, stats)
        held = sum(_anonymous_bytes(proc, member) + device.get(member, 0) for member in family)
        rows.append({"pid": pid, "name": _name(commands[pid]), "vllm": bool(family & engines), "bytes": held})
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


def _with_parents(pids: set[int], stats: Mapping[int, processes.Stat]) -> set[int]:
    return pids.union(*(_parents(pid, stats) for pid in pids))


def _is_ours(proc: Path, pid: int) -> bool:
    return f"\0{RANK_ID_VARIABLE}=".encode() in b"\0" + _read(proc, pid, "environ")


def _name(command: bytes) -> str:
    """Its program, and what it runs: no argument, which might be a key."""
    words = [os.fsdecode(word) for word in command.split(b"\0") if word]
    if not words:
        return "?"
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    return f"{os.path.basename(words[0].split(' ')[0])} {module}".strip()[:80]


def _anonymous_bytes(proc: Path, pid: int) -> int:
    lines = _read(proc, pid, "status").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(b"RssAnon:")), 0)


def _read(proc: Path, pid: int, name: str) -> bytes:
    """Empty of a process that has ended, or that is another user's."""
    try:
        return (proc / str(pid) / name).read_bytes()
    except OSError:
        return b""
