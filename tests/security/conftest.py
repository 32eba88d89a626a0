"""The fixtures of the gateway's tests, for attacks on the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.sparkd.gateway import conftest as gateways
from tests.sparkd.gateway.conftest import engine, gateway, no_tracebacks, quiet

__all__ = ["engine", "gateway", "no_tracebacks", "quiet"]

# They open and lose connections, which the two loops do differently.
ON_BOTH_LOOPS = ("test_connections.py", "test_leaving_clients.py")


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Both event loops for ON_BOTH_LOOPS, asyncio's own for the others."""
    factories = gateways.pytest_asyncio_loop_factories(config, item)
    return factories if item.path.name in ON_BOTH_LOOPS else {"asyncio": factories["asyncio"]}
