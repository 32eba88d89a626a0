"""The fixtures of the gateway's tests, for attacks on the gateway."""

from __future__ import annotations

from tests.sparkd.gateway.conftest import engine, gateway, no_tracebacks, pytest_asyncio_loop_factories, quiet

__all__ = ["engine", "gateway", "no_tracebacks", "pytest_asyncio_loop_factories", "quiet"]
