"""The Ray actor of a node, and the jobs that it runs there."""

from __future__ import annotations

from typing import Any

from workers.agent.version import VERSION

__all__ = ["VERSION", "Agent"]


def __getattr__(name: str) -> Any:
    """`Agent`, by the name under which Ray keeps the class of an agent that a daemon before this layout started: Ray may start it again."""
    if name == "Agent":
        from workers.agent.actor import Agent

        return Agent
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
