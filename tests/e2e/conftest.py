"""One real daemon with real Ray and real vLLM (CPU build) and a real small chat model, shared by every end-to-end test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkd.embedded import FOLDER_NAME, is_prepared, prepare
from tests.daemon_process import ROOT, DaemonProcess, daemon

NAME = "smollm2-135m-instruct"
START_S = 240.0


@pytest.fixture(scope="session")
def chat_model() -> Path:
    """SmolLM2-135M-Instruct, prepared once beside the checkout as `make serve` does."""
    folder = ROOT / ".sparkd" / "models" / FOLDER_NAME
    if not is_prepared(folder):
        prepare(folder)
    return folder


@pytest.fixture(scope="session")
def foreign_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter whose environment has vLLM and not sparkd: a path line brings our packages, but not the editable install."""
    venv = tmp_path_factory.mktemp("foreign") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (site,) = (venv / "lib").glob("python*/site-packages")
    ours = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "ours.pth").write_text(f"{ours}\n")
    return venv / "bin" / "python"


@pytest.fixture(scope="package")
def served(chat_model: Path, foreign_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    engine = {"model": str(chat_model), "max_model_len": 2048, "max_num_seqs": 4, "env": {"VLLM_CPU_KVCACHE_SPACE": "1"}}
    settings = {
        "backoff": {"initial_s": 0.5, "max_s": 2},
        "models": {
            NAME: engine | {"aliases": ["gpt-4o", "claude-sonnet"], "preload": True},
            "foreign": engine | {"runtime": str(foreign_python)},
            "quantized": engine | {"runtime": str(foreign_python), "quantize": "int4-g64"},
        },
    }
    with daemon(tmp_path_factory.mktemp("e2e"), settings) as made:
        made.wait_for(NAME, "READY", START_S)
        yield made
