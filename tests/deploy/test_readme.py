"""The first commands and the first configuration of README.md: make knows its targets and variables, and the entry means what it says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from deploy.setup import CONSTRAINTS, CUDA_ENGINE
from sparkd.cli.config_check import check
from sparkd.config.config import load_config

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def make(*words: str) -> str:
    """The commands that make would run, or what `help` prints."""
    done = subprocess.run(["make", "-C", ROOT, *words], capture_output=True, text=True, check=True)
    return done.stdout


def test_make_has_every_target_and_variable_of_the_table() -> None:
    rows = re.findall(r"^\| `make ([^`]+)` \|", README, re.MULTILINE)

    assert len(rows) >= 5
    for row in rows:
        assert make("-n", *row.split())


def test_make_serve_hands_its_variables_on() -> None:
    shown = make("-n", "serve", "MODEL=/models/Qwen3-8B", "PORT=4001", "ENGINE=vllm==0.31.0")

    assert '--engine "vllm==0.31.0" --port "4001"' in shown
    assert re.search(r'sparkd" serve .*--port "4001" .*--model "/models/Qwen3-8B"', shown, re.DOTALL)


@pytest.mark.parametrize("file", ["README.md", "docs/service.md", "deploy/README.md", "deploy/install.sh"])
def test_the_service_gets_the_versions_that_make_serve_installs(file: str) -> None:
    (arguments,) = re.findall(r"bin/pip install (.*?)\"?$", (ROOT / file).read_text(), re.MULTILINE)

    assert arguments == f". {CUDA_ENGINE} -c {CONSTRAINTS['cuda'][0]}"


def test_the_first_configuration_is_taken(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    file = tmp_path / "sparkd.yaml"
    file.write_text(text)

    assert check(file, {}) == []
    config = load_config(file, environ={})
    entry = config.models["qwen3-30b"]
    assert (entry.aliases, entry.max_model_len, entry.ttl) == (("gpt-4o",), 32768, 1800)
    assert config.preload() == ("qwen3-30b",)
