"""One real daemon with real Ray, real vLLM (CPU build) and a real small chat model, for the files that SHARED of tests/conftest.py has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deploy.embedded_model import FOLDER_NAME, is_prepared, prepare
from tests.support.daemon_process import ROOT, DaemonProcess, daemon
from tests.support.ray_node import reserve_gib
from tests.support.waiting import HUNG_S

NAME, QUANTIZED = "smollm2-135m-instruct", "quantized"
# What the node offers, and each model reserves: there is room for one at a time.
OFFERED_GIB, MODEL_GIB = 5, 3
# Four requests of the chat model in float32. Every byte is written when an engine starts.
KV_BYTES = 384 << 20


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
def daemon_with_models(chat_model: Path, foreign_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    engine = {"model": str(chat_model), "memory_gib": MODEL_GIB, "max_model_len": 2048, "max_num_seqs": 4, "kv_cache": {"bytes": KV_BYTES}}
    settings = {
        "memory": {"guard": "off", "os_reserve_gib": reserve_gib(OFFERED_GIB)},
        # One thread: more of them spin while they wait for each other, which takes a core from the tests beside.
        "engine": {"env": {"OMP_NUM_THREADS": "1"}},
        "backoff": {"initial_s": 0.5, "max_s": 2},
        "models": {
            # In float32, as `make serve` starts it: a CPU with AMX rounds its first word to the wrong side in bfloat16.
            NAME: engine | {"dtype": "float32", "aliases": ["gpt-4o", "claude-sonnet"], "preload": True},
            QUANTIZED: engine | {"runtime": str(foreign_python), "quantize": "int4-g64"},
        },
    }
    with daemon(tmp_path_factory.mktemp("e2e"), settings) as made:
        yield made


@pytest.fixture
def served(daemon_with_models: DaemonProcess) -> DaemonProcess:
    """With the chat model READY, whatever the test before left."""
    if daemon_with_models.model(NAME)["want"] != "RUNNING":
        daemon_with_models.load(NAME)
    daemon_with_models.wait_for(NAME, "READY")
    return daemon_with_models


def engine_metric(served: DaemonProcess, name: str) -> float:
    """Straight from the engine's socket: the gateway's copy is up to five seconds old."""
    (rank,) = served.model(NAME)["ranks"]
    with httpx.Client(transport=httpx.HTTPTransport(uds=rank["socket_path"]), base_url="http://engine", timeout=HUNG_S) as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))
