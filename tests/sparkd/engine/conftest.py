"""The fixture of the gateway's tests that has an engine of raw bytes, for the client of an engine."""

from __future__ import annotations

from tests.sparkd.gateway.conftest import engine

__all__ = ["engine"]
