"""The fixtures of the gateway's tests, for attacks on the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from tests.sparkd.gateway.conftest import engine, gateway, no_tracebacks, quiet

__all__ = ["engine", "gateway", "no_tracebacks", "quiet"]

# They open and lose connections, which the two loops do differently.
ON_BOTH_LOOPS = ("test_connections.py", "test_leaving_clients.py")


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """uvloop, as the daemon; for ON_BOTH_LOOPS asyncio's own too."""
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop}
    return factories | {"asyncio": asyncio.new_event_loop} if item.path.name in ON_BOTH_LOOPS else factories
