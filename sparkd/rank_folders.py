"""Owns where a node's ranks keep what is theirs. Never makes a folder."""

from __future__ import annotations

import re
from pathlib import Path

from sparkd.config import Config


def rank_folders(config: Config, node_ip: str) -> tuple[Path, Path, Path, Path]:
    """Where the ranks of the node `node_ip` have their status files and sockets, their logs, quantized weights, and what sizing learned.

    The first are named after the node, so that nodes that share a file system do not mix.
    """
    run_dir = config.runtime_path() / "ranks" / folder_name(node_ip)
    return run_dir, config.state_dir / "logs", config.quantized_path(), config.profiles_path()


def folder_name(node_ip: str) -> str:
    return node_ip.replace(":", "_")


def slug_of(model: str) -> str:
    """A model's name as the name of a file."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-.")[:48] or "model"
