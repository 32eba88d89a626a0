"""A stub engine, for tests and benches: speaks as vLLM does, computes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# A rank finds sparkd's two packages by itself. Where the tests are, its entry says.
ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}


def stub_engine(**env: str) -> dict[str, Any]:
    """The keys of `engine:`, or of a model's entry, by which sparkd starts this engine. env: what it is to do (tests/stub/__main__.py)."""
    return {"entrypoint": "tests.stub", "env": ENVIRONMENT | env}
