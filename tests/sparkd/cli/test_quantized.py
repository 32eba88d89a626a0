"""`ls --cached`, `rm --cached` and `export` as they are typed, on real entries and without a daemon."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkd.__main__ import exit_code
from sparkd.checkpoint import Checkpoint, read_checkpoint
from tests.support.checkpoints import Tensor, normal, write_checkpoint
from tests.support.facts import lacking
from tests.support.waiting import HUNG_S
from workers.cache import store
from workers.cache.writer import CacheContent, CacheWriter
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


def kept(tmp_path: Path, source: Checkpoint, recipe: Any = NVFP4, tp_slice: tuple[int, int] | None = None) -> str:
    made = CacheWriter(str(tmp_path / "state" / "quantized"), CacheContent(source, recipe, tp_slice, {}, {"t": ("U8", (2 << 20,))}))
    made.add("t", torch.zeros(2 << 20, dtype=torch.uint8))
    assert made.finish() == "written", made.reason
    return os.path.basename(made.folder)


def there(tmp_path: Path) -> list[str]:
    folder = tmp_path / "state" / "quantized"
    return sorted(name for name in os.listdir(folder) if not name.startswith(".")) if folder.is_dir() else []


# ls --cached


def test_nothing_is_kept_yet(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["ls", "--cached"]) == 0
    assert lacking(capsys.readouterr().out, f"{here}/state/quantized") == []


def test_what_is_kept(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    configure(here, monkeypatch, quantized_cache={"limit_gib": 3})
    first = kept(here, checkpoint(here / "Tiny-A"))
    second = kept(here, checkpoint(here / "Tiny-B"), QuantizationRecipe.parse("mxfp4").canonical(), (1, 2))
    shutil.rmtree(here / "Tiny-B")

    assert exit_code(["ls", "--cached"]) == 0
    shown = capsys.readouterr().out.splitlines()

    assert shown[0].split() == ["MODEL", "FORMAT", "SIZE", "MADE", "USED", "VALID", "SOURCE"]
    assert re.fullmatch(rf"tiny-a +nvfp4 +2\.0 MiB +\S+ +\S+ +yes +{re.escape(str(here))}/Tiny-A *", shown[1])
    assert re.fullmatch(rf"tiny-b +mxfp4 2/2 +2\.0 MiB +\S+ +\S+ +no +{re.escape(str(here))}/Tiny-B *", shown[2])
    assert shown[3].startswith(f"{second}: {here}/Tiny-B: ")
    assert shown[4] == f"4.0 MiB of 3.00 GiB in {here}/state/quantized"
    assert first.startswith("tiny-a-nvfp4-")


def test_what_is_kept_as_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = kept(here, checkpoint(here / "Tiny-A"))

    assert exit_code(["ls", "--cached", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)

    assert (told["folder"], told["limit_bytes"]) == (f"{here}/state/quantized", None)
    (row,) = told["cached"]
    assert row["created_s"] > 0
    assert row["used_s"] > 0
    assert row["size_bytes"] > 2 << 20
    assert {key: row[key] for key in ("name", "model", "format", "quantize", "tensor_parallel", "source", "valid", "fault", "folder")} == {
        "name": name,
        "model": "tiny-a",
        "format": "nvfp4",
        "quantize": NVFP4,
        "tensor_parallel": None,
        "source": f"{here}/Tiny-A",
        "valid": True,
        "fault": None,
        "folder": f"{here}/state/quantized/{name}",
    }


# rm --cached


@pytest.mark.parametrize("spelling", ["name", "entry", "configured", "relative"])
def test_a_models_entries_are_removed_whatever_it_is_called(
    here: Path, spelling: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(here, monkeypatch, models={"mine": {"model": f"{here}/Tiny-A", "aliases": ["gpt"]}})
    monkeypatch.chdir(here)
    one = kept(here, checkpoint(here / "Tiny-A"))
    other = kept(here, checkpoint(here / "Tiny-AB"))
    asked = {"name": "tiny-a", "entry": one, "configured": "gpt", "relative": "./Tiny-A"}[spelling]

    assert exit_code(["rm", "--cached", asked]) == 0

    assert there(here) == [other]
    assert lacking(capsys.readouterr().out, one, "2.0 MiB") == []


def test_two_models_of_one_folder_have_weights_of_their_own(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = f"{here}/Tiny-A"
    configure(here, monkeypatch, models={name: {"model": folder, "quantize": name} for name in ("nvfp4", "fp8")})
    source = checkpoint(here / "Tiny-A")
    four, eight = kept(here, source), kept(here, source, {**QuantizationRecipe.parse("fp8").canonical(), "device": "cpu"})

    assert exit_code(["ls", "--cached", "--json"]) == 0
    assert {row["name"]: row["entries"] for row in json.loads(capsys.readouterr().out)["cached"]} == {four: ["nvfp4"], eight: ["fp8"]}
    assert exit_code(["rm", "--cached", "fp8"]) == 0
    assert there(here) == [four]
    assert exit_code(["rm", "--cached", folder]) == 0
    assert there(here) == []


def test_a_hub_ids_entries_are_its_owners_only(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, yours = (kept(here, checkpoint(here / "hub" / f"models--{owner}--Tiny" / "snapshots" / "0a1b")) for owner in ("me", "you"))
    both = [mine, yours]
    assert all(name.startswith("tiny-nvfp4-") for name in both)

    assert exit_code(["rm", "--cached", "--json", "you/Tiny"]) == 0

    assert there(here) == [mine]
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["removed"]] == [yours]


def test_what_an_engine_reads_stays(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(here / "Tiny-A")
    read, other = kept(here, source), kept(here, source, QuantizationRecipe.parse("fp8").canonical())
    found = store.find(str(here / "state" / "quantized"), source, NVFP4)
    assert found is not None

    with found:
        assert exit_code(["rm", "--cached", "tiny-a"]) == 5

    assert there(here) == [read]
    err = capsys.readouterr().err
    assert err.startswith(f"error: {read}: ") and lacking(err, "READY", f"Removed: {other}") == []
    assert exit_code(["rm", "--cached", "tiny-a"]) == 0


def test_nothing_of_a_model_is_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept(here, checkpoint(here / "Tiny-A"))

    assert exit_code(["rm", "--cached", "tiny"]) == 2

    assert len(there(here)) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and lacking(err, "tiny", f"{here}/state/quantized", "`sparkd ls --cached`", "--config") == []


# What killed loads leave


def killed(tmp_path: Path) -> Path:
    """What a writer leaves that nobody could tell to stop: its files at their full size, and a lock that nobody holds."""
    folder = tmp_path / "state" / "quantized" / ".writing-tiny-a-nvfp4-0123456789abcdef"
    folder.mkdir(parents=True)
    with (folder / "model.safetensors").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 3 << 20)
    folder.with_name(f"{folder.name}.lock").touch()
    return folder


def test_what_a_killed_load_left_is_removed_and_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed(here)

    assert exit_code(["ls", "--cached"]) == 0

    assert lacking(capsys.readouterr().out, "3.0 MiB") == []
    assert [name for name in os.listdir(here / "state" / "quantized") if name != ".lock"] == []


def test_what_is_being_written_is_told_and_stays(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(here / "Tiny-A")
    writer = CacheWriter(str(here / "state" / "quantized"), CacheContent(source, NVFP4, None, {}, {"t": ("U8", (2 << 20,))}))
    writer.add("t", torch.zeros(2 << 20, dtype=torch.uint8))
    assert writer._writer is not None
    writer._writer.flush()

    assert exit_code(["ls", "--cached"]) == 0
    assert capsys.readouterr().out.startswith("2.0 MiB ")
    assert writer.finish() == "written"


# export


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
