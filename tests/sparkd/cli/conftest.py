"""No setting, daemon, model or kept answer of the machine that runs the command line's tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("SPARKD_", "HF_", "VLLM_", "NCCL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SPARKD_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
