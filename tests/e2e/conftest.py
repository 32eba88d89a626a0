"""One real daemon with real Ray and real vLLM (CPU build) and a real small chat model, shared by every end-to-end test. Tests that ask for
`kinds` have the engines of tests/support/kv_kinds_case.py beside its first starts, which leave a core idle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.embedded_model import FOLDER_NAME, is_prepared, prepare
from tests.support.daemon_process import ROOT, DaemonProcess, daemon
from tests.support.kv_kinds_case import REFUSED, TWO_RANKS
from tests.support.otlp_receiver import Receiver, receiver

NAME = "smollm2-135m-instruct"
START_S = 240.0
# Of the case's kinds, those that differ in how a request takes blocks; the others are the first of them with other flags.
KINDS = ("sliding", "latent", "linear", "draft model", "n-gram")
# In this order: n-gram is the last (kv_kinds_case.py).
ORDER = [REFUSED, *KINDS[:-1], TWO_RANKS, KINDS[-1]]
POOL = 64 << 20


class Kinds:
    """One process with an engine of each kind, one after the other."""

    def __init__(self, folder: Path) -> None:
        case, self._output = folder / "case.json", folder / "output"
        case.write_text(json.dumps({"folder": str(folder), "kinds": ORDER, "pool_bytes": POOL}))
        env = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
            "OMP_WAIT_POLICY": "PASSIVE",
            "VLLM_NO_USAGE_STATS": "1",
        }
        with case.open() as stdin, self._output.open("w") as output:
            command = [sys.executable, "-m", "tests.support.kv_kinds_case"]
            self.process = subprocess.Popen(
                command, env=env, cwd=ROOT, stdin=stdin, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def said(self) -> dict[str, dict[str, Any]]:
        """What each kind came to, once all have."""
        self.process.wait(500)
        lines = [line.removeprefix("kv_kind ") for line in self.log().splitlines() if line.startswith("kv_kind ")]
        found = {one["kind"]: one for one in map(json.loads, lines)}
        assert list(found) == ORDER, self.log()[-4000:]
        return found

    def log(self) -> str:
        return self._output.read_text(errors="replace")


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kinds]:
    """Started, and not waited for; before `served` where a file asks for both."""
    made = Kinds(tmp_path_factory.mktemp("kinds"))
    yield made
    made.process.kill()
    made.process.wait()


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
def collector() -> Iterator[Receiver]:
    """Gets the spans of `served` and of its engines."""
    with receiver() as made:
        yield made


@pytest.fixture(scope="package")
def served(
    chat_model: Path, foreign_python: Path, collector: Receiver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DaemonProcess]:
    engine = {"model": str(chat_model), "max_model_len": 2048, "max_num_seqs": 4, "env": {"VLLM_CPU_KVCACHE_SPACE": "1"}}
    settings = {
        "backoff": {"initial_s": 0.5, "max_s": 2},
        "traces": {"endpoint": collector.url},
        "models": {
            # In float32, as `make serve` starts it: a CPU with AMX rounds its first word to the wrong side in bfloat16.
            NAME: engine | {"dtype": "float32", "aliases": ["gpt-4o", "claude-sonnet"], "preload": True},
            "quantized": engine | {"runtime": str(foreign_python), "quantize": "int4-g64"},
        },
    }
    with daemon(tmp_path_factory.mktemp("e2e"), settings) as made:
        made.wait_for(NAME, "READY")
        yield made
