"""What holds for every test: Ctrl-C is what it is in a terminal, and some have the machine to themselves.

A shell that starts the tests in the background has Ctrl-C ignored (POSIX sh, 2.11), and what they start would inherit that. Tests that
start engines, daemons or Ray, or look at what a process or the machine holds, are marked `alone`: they run one after another, the others
side by side (Makefile). Who asks for the one kind does not import the other's files.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ALONE = (
    "e2e",
    "gateway/test_huge_and_slow.py",
    "gateway/test_memory.py",
    "security/test_engine_door.py",
    "security/test_ray_children.py",
    "security/test_descriptors.py",
    "test_agent.py",
    "test_cli_daemon.py",
    "test_daemon.py",
    "test_faulty_daemon.py",
    "test_rayhead.py",
    "test_raylink.py",
    "test_reconcile.py",
    "test_restart.py",
    "test_team_start.py",
    "test_sentry.py",
    "test_two_nodes.py",
)

signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Half a minute is spent on importing thousands of tests, and torch with them, for some hundreds of others."""
    asked = {"alone": False, "not alone": True}.get(config.getoption("markexpr"))
    return True if collection_path.name.startswith("test_") and _alone(collection_path) == asked else None


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if _alone(item.path):
            item.add_marker(pytest.mark.alone)


def _alone(path: Path) -> bool:
    return path.relative_to(TESTS).as_posix().startswith(ALONE)
