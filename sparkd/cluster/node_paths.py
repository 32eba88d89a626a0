"""Names the folders of a node's ranks, and the paths that the daemon passes to the node's agent."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from sparkd.config.config import Config

SYSTEM_RUNTIME_DIR = Path("/run/sparkd")


def rank_folders(config: Config, node_ip: str) -> tuple[Path, Path, Path, Path]:
    """Where the ranks of the node `node_ip` have their status files and sockets, their logs, quantized weights, and what sizing learned.

    The first are named after the node, so that nodes that share a file system do not mix.
    """
    run_dir = config.runtime_path / "ranks" / folder_name(node_ip)
    return run_dir, config.state_dir / "logs", config.quantized_path, config.profiles_path


def agent_arguments(config: Config, here: str, node_ip: str) -> tuple[Any, ...]:
    """See workers.agent.actor.Agent. Another node's folders are those of its own `sparkd ray-node`; these stand in where it has none."""
    run_dir, log_dir, *_ = rank_folders(config, here)
    own, memory = run_dir.with_name(folder_name(node_ip)), config.memory
    return str(own), str(log_dir), memory.sample_s, "/proc", node_ip != here, memory.guard_settings()


def remove_empty(runtime: Path) -> None:
    """Remove the runtime folder where nothing is left in it. The service's own is systemd's (RuntimeDirectory=)."""
    if runtime != SYSTEM_RUNTIME_DIR:
        with contextlib.suppress(OSError):
            runtime.rmdir()


def folder_name(node_ip: str) -> str:
    return node_ip.replace(":", "_")


def slug_of(model: str) -> str:
    """A model's name as the name of a file."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-.")[:48] or "model"
