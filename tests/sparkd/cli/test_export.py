"""`export` as it is typed, without a daemon."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkd.__main__ import exit_code
from sparkd.checkpoint import Checkpoint, read_checkpoint
from sparkd.cli.export import chosen
from tests.support.checkpoints import Tensor, normal, write_checkpoint
from tests.support.facts import lacking
from tests.support.waiting import HUNG_S
from workers.cache import store
from workers.quantization.recipe import QuantizationRecipe

ROOT = Path(__file__).resolve().parents[3]
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 256}
NVFP4 = QuantizationRecipe.parse("nvfp4").canonical()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration of its own, and a disk with room."""
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(1 << 40, 1 << 39, 1 << 39))
    configure(tmp_path, monkeypatch)
    return tmp_path


def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    file = tmp_path / "sparkd.yaml"
    file.write_text(json.dumps({"state_dir": str(tmp_path / "state"), **more}))
    monkeypatch.setenv("SPARKD_CONFIG", str(file))


def checkpoint(folder: Path) -> Checkpoint:
    entries = [Tensor("model.embed_tokens.weight", (256, 64), draw=normal(1.0))]
    entries += [Tensor(f"model.layers.{layer}.mlp.up_proj.weight", (64, 64), draw=normal(0.1)) for layer in range(4)]
    return read_checkpoint(write_checkpoint(folder, CONFIG, entries))


def test_a_configured_model_is_exported_and_can_be_listed(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(here / "Tiny-A")
    configure(here, monkeypatch, models={"mine": {"model": f"{here}/Tiny-A", "quantize": "int4-g32"}})

    assert exit_code(["export", "mine", str(here / "out"), "--device", "cpu", "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    found = read_checkpoint(here / "out")
    assert told == {"folder": f"{here}/out", "bytes": sum(shard.size_bytes for shard in found.shards), "from": "checkpoint"}
    assert found.config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == 32


@pytest.mark.rest
def test_a_folder_is_exported_with_a_recipe(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(here / "Tiny-A")

    assert exit_code(["export", str(here / "Tiny-A"), str(here / "out"), "--quantize", "{format: fp8}"]) == 0

    shown = capsys.readouterr()
    assert shown.out.startswith(f"{here}/out: ") and "quantizing" in shown.err
    assert read_checkpoint(here / "out").config["quantization_config"]["format"] == "float-quantized"
    assert exit_code(["export", str(here / "Tiny-A"), str(here / "out"), "--quantize", "fp8"]) == 2
    assert lacking(capsys.readouterr().err, f"{here}/out") == []


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["unknown", "out"], ["unknown", "--config"]),
        (["plain", "out"], ["plain", "`quantize`"]),
        (["gone", "out"], ["/none", "`model`"]),
        (["empty", "out", "--quantize", "nvfp4"], ["/python", "torch", "engine.runtime"]),
    ],
)
def test_what_cannot_be_exported(
    here: Path, argv: list[str], names: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {
        "gone": {"model": f"{here}/none"},
        "plain": {"model": f"{here}/shapeless"},
        "empty": {"model": f"{here}/shapeless", "runtime": str(here / "python")},
    }
    (here / "shapeless").mkdir()
    (here / "shapeless" / "config.json").write_text("{}")
    (here / "python").write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    (here / "python").chmod(0o755)
    configure(here, monkeypatch, models=models)

    assert exit_code(["export", *argv]) in (1, 2)
    assert lacking(capsys.readouterr().err, *names) == []


def test_a_name_that_only_the_daemon_knows_is_exported_by_its_entry(here: Path) -> None:
    folder = checkpoint(here / "Tiny-A").folder
    entry = {"model": folder, "revision": None, "quantize": NVFP4, "dtype": "float32"}
    found = chosen("brought", None, None, os.environ, lambda _name: {"resolved": entry})
    assert (found.folder, found.recipe.canonical()) == (folder, NVFP4)


def test_ctrl_c_ends_an_export_and_leaves_nothing(here: Path) -> None:
    source = checkpoint(here / "Tiny-A")
    slow = here / "python"
    code = "import signal, sys, workers.vllm.export as e; say = e._say; e._say = lambda **l: (say(**l), signal.pause()); sys.exit(e.main())"
    slow.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}"\n')
    slow.chmod(0o755)
    (here / "sparkd.yaml").write_text(json.dumps({"state_dir": str(here / "state"), "engine": {"runtime": str(slow)}}))

    child = subprocess.Popen(
        [sys.executable, "-m", "sparkd", "export", source.folder, str(here / "out"), "--quantize", "fp8", "--device", "cpu"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    assert child.stderr is not None
    with child:
        assert "quantizing" in child.stderr.readline()
        assert (here / "out" / ".writing").is_dir()
        child.send_signal(signal.SIGINT)
        assert child.wait(HUNG_S) == 130

    assert not list(here.glob("*out*"))
