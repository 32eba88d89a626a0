"""The export of a quantized checkpoint: the same from the cache and from the source, whole or not there. Real files, a real program."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkd.checkpoint import Checkpoint, read_checkpoint
from sparkd.errors import CheckpointError
from tests.support.architectures import gpt_oss
from tests.support.checkpoints import Tensor, normal, write_checkpoint
from tests.support.facts import facts
from tests.support.waiting import HUNG_S
from workers.cache.atomic_folder import appearing
from workers.cache.writer import CacheContent, CacheWriter, layout_of
from workers.load.formats import quantizer
from workers.load.virtual import VirtualCheckpoint
from workers.quantization.recipe import QuantizationRecipe
from workers.vllm import export as program
from workers.vllm.export import ExportRequest, Tell, export
from workers.vllm.load.config import linear_modules, quantization_config

ROOT = Path(__file__).resolve().parents[3]
RECIPE = QuantizationRecipe.parse("int4-g32").canonical()
CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 256, "torch_dtype": "bfloat16"}
MODULES = [f"model.layers.{layer}.mlp.{name}_proj" for layer in range(4) for name in ("gate", "up", "down")]


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    entries = [Tensor("model.embed_tokens.weight", (256, 64), draw=normal(1.0)), Tensor("model.norm.weight", (64,))]
    entries += [Tensor(f"{module}.weight", (64, 64), draw=normal(0.1)) for module in MODULES]
    return read_checkpoint(write_checkpoint(tmp_path / "tiny", CONFIG, entries, shard_bytes=40_000))


def exported(source: Checkpoint, target: Path, cache: Path | None = None, tell: Tell = lambda *_: None) -> tuple[str, int]:
    return export(ExportRequest(source.folder, RECIPE, str(target), None if cache is None else str(cache), "cpu"), tell)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def cached(source: Checkpoint, cache_dir: Path) -> None:
    """What a load leaves in the cache."""
    recipe = QuantizationRecipe.parse(RECIPE)
    formats = recipe.assign(source)
    virtual = VirtualCheckpoint(source, formats)
    described = quantization_config(formats, linear_modules(source))
    made = CacheWriter(str(cache_dir), CacheContent(source, RECIPE, None, described, layout_of(virtual)))
    for name in (tensor.name for tensor in virtual.outputs()):
        module, _, suffix = name.rpartition(".")
        form = formats.get(module)
        tensor = tensor_of(source, name) if form is None else quantizer(form).quantize(tensor_of(source, f"{module}.weight"))[suffix]
        made.add([name], tensor.unsqueeze(0))
    assert made.finish() == "written", made.reason


def tensor_of(source: Checkpoint, name: str) -> torch.Tensor:
    ref = source.tensors[name]
    raw = bytearray(Path(ref.path).read_bytes()[ref.offset : ref.offset + ref.nbytes])
    return torch.frombuffer(raw, dtype=torch.bfloat16).view(ref.shape)


def test_the_cache_and_the_source_give_the_same(source: Checkpoint, tmp_path: Path) -> None:
    cached(source, tmp_path / "cache")
    told: list[tuple[str, int, int]] = []

    straight = exported(source, tmp_path / "straight", tell=lambda *said: told.append(said))
    copied = exported(source, tmp_path / "copied", tmp_path / "cache", lambda *said: told.append(said))

    assert [straight[0], copied[0]] == ["checkpoint", "cache"]
    assert straight[1] == copied[1]
    assert files(tmp_path / "straight") == files(tmp_path / "copied")
    for where in ("checkpoint", "cache"):
        steps = [said for said in told if said[0] == where]
        assert [done for _, done, _ in steps] == sorted(done for _, done, _ in steps)
        assert steps[-1][1] == steps[-1][2] > 0


def test_what_is_handed_out_is_a_checkpoint_and_nothing_of_a_cache(source: Checkpoint, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"

    exported(source, target)

    found = read_checkpoint(target)
    assert found.quantization is not None
    assert found.quantization.method == "compressed-tensors"
    assert found.config["quantization_config"]["format"] == "pack-quantized"
    expected = quantizer(QuantizationRecipe.parse(RECIPE).assign(source)[MODULES[5]]).quantize(tensor_of(source, f"{MODULES[5]}.weight"))
    for suffix, part in expected.items():
        ref = found.tensors[f"{MODULES[5]}.{suffix}"]
        assert Path(ref.path).read_bytes()[ref.offset : ref.offset + ref.nbytes] == part.contiguous().view(torch.uint8).numpy().tobytes()
    assert sorted(files(target)) == ["config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json", *tokenizer(source)]
    assert os.listdir(target.parent) == ["out"]


def tokenizer(source: Checkpoint) -> list[str]:
    return sorted(name for name in os.listdir(source.folder) if "token" in name)


@pytest.mark.parametrize("how", ["folder", "link", "link to nothing", "new disk"])
def test_a_folder_that_is_there_stays_the_same_folder(tmp_path: Path, how: str) -> None:
    """A mount point cannot be replaced, nor a link by a rename; a new disk has a lost+found."""
    real, target = tmp_path / "real", tmp_path / "out"
    if how in ("folder", "new disk"):
        target.mkdir()
    else:
        target.symlink_to(real)
    if how == "link":
        real.mkdir()
    if how == "new disk":
        (target / "lost+found").mkdir()
    before = target.stat().st_ino if target.exists() else None

    with appearing(str(target)) as writing:
        (Path(writing) / "config.json").write_text("{}")

    assert before in (None, target.stat().st_ino)
    assert target.is_symlink() is how.startswith("link")
    assert files(target) == {"config.json": b"{}"}
    assert not list(tmp_path.rglob(".writing"))


def test_a_folder_that_holds_anything_else_is_left_alone(source: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")

    with pytest.raises(CheckpointError) as caught:
        exported(source, tmp_path / "full")

    assert caught.value.file == str(tmp_path / "full")
    assert files(tmp_path / "full") == {"file": b"mine"}


def test_an_export_that_was_killed_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / ".writing").mkdir(parents=True)
    (out / ".writing" / "model.safetensors").write_bytes(b"half")

    with appearing(str(out)) as writing:
        assert (os.listdir(out), os.listdir(writing)) == ([os.path.basename(writing)], [])
        (Path(writing) / "config.json").write_text("{}")

    assert files(out) == {"config.json": b"{}"}


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("fails_at", [0, 2])
def test_a_folder_looks_whole_only_when_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int, is_new: bool) -> None:
    out, seen, real = tmp_path / "out", [], os.rename
    if not is_new:
        out.mkdir()

    def rename(before: str, after: str) -> None:
        seen.append(sorted(files(out)))
        if len(seen) > fails_at:
            raise OSError(5, "Input/output error", after)
        real(before, after)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="Input/output"), appearing(str(out)) as writing:
        for name in ("a.safetensors", "config.json", "tokenizer.json", "additional_chat_templates/tools.jinja"):
            (Path(writing) / name).parent.mkdir(exist_ok=True)
            (Path(writing) / name).write_text("x")

    assert all("config.json" not in found for found in seen)
    assert out.exists() is not is_new and not list(tmp_path.rglob("*.safetensors"))


def test_a_recipe_that_quantizes_nothing_of_it_is_refused(source: Checkpoint, tmp_path: Path) -> None:
    exported(source, tmp_path / "once")

    with pytest.raises(CheckpointError) as caught:
        export(ExportRequest(source.folder, {"format": "bf16"}, str(tmp_path / "out")), lambda *_: None)
    assert caught.value.file == source.folder
    with pytest.raises(CheckpointError, match=r"\(compressed-tensors\)") as caught:
        export(ExportRequest(str(tmp_path / "once"), RECIPE, str(tmp_path / "out")), lambda *_: None)
    assert caught.value.file == str(tmp_path / "once")
    assert not list(tmp_path.glob("*out*"))


def test_a_disk_without_room_is_said_first(source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program.shutil, "disk_usage", lambda _path: program.shutil._ntuple_diskusage(1 << 40, 1 << 40, 1000))

    with pytest.raises(CheckpointError) as caught:
        exported(source, tmp_path / "out")
    assert (caught.value.file, facts(caught.value.problem)) == (str(tmp_path / "out"), "0.0 0.0")

    assert not list(tmp_path.glob("*out*"))


def test_an_interruption_leaves_nothing(source: Checkpoint, tmp_path: Path) -> None:
    def enough(_source: str, _done: int, _total: int) -> None:
        raise KeyboardInterrupt

    cached(source, tmp_path / "cache")
    for cache_dir in (None, str(tmp_path / "cache")):
        with pytest.raises(KeyboardInterrupt):
            export(ExportRequest(source.folder, RECIPE, str(tmp_path / "out"), cache_dir, "cpu"), enough)

    assert not list(tmp_path.glob("*out*"))


def test_cuda_that_is_not_there_is_refused(source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program.torch.cuda, "is_available", lambda: False)
    with pytest.raises(CheckpointError, match=r"--device .*engine\.runtime"):
        export(ExportRequest(source.folder, RECIPE, str(tmp_path / "out"), device="cuda"), lambda *_: None)


def test_what_a_model_holds_decides_the_dtype() -> None:
    """A weight that names none is bfloat16."""
    configs = ({}, {"torch_dtype": "float16"}, {"dtype": "torch.float32"}, {"text_config": {"dtype": "float16"}})
    assert [program._dtype(config) for config in configs] == [torch.bfloat16, torch.float16, torch.float32, torch.float16]


# The program

STANDING = """
import sys, time, workers.vllm.export as program
say = program._say
def stand(**line):
    say(**line)
    while line["event"] == "progress":
        time.sleep(0.05)  # a pause() misses a signal that comes right before it
program._say = stand
sys.exit(program.main())
"""
UNPACED = "import sys, workers.vllm.export as program; program.EVERY_S = 0; sys.exit(program.main())"


@pytest.mark.parametrize("ended", [True, pytest.param(False, marks=pytest.mark.rest)], ids=["SIGTERM", "its reader has gone"])
def test_a_program_that_is_ended_or_not_listened_to_leaves_nothing(source: Checkpoint, tmp_path: Path, ended: bool) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", STANDING if ended else UNPACED], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        if not ended:
            child.stdout.close()
        child.stdin.write(
            json.dumps({"source": source.folder, "quantize": RECIPE, "target": str(tmp_path / "out"), "device": "cpu"}).encode()
        )
        child.stdin.close()
        if ended:
            assert json.loads(child.stdout.readline())["event"] == "progress"
            assert (tmp_path / "out" / ".writing").is_dir()
            child.send_signal(signal.SIGTERM)
        assert child.wait(HUNG_S) == (program.INTERRUPTED if ended else 1)

    assert not list(tmp_path.glob("*out*"))


STOCK = """
print("INFO: whatever a vLLM says of itself")
"""


def test_the_vllm_beside_it_is_asked_before_anything_is_written(tmp_path: Path) -> None:
    """One whose class takes no second scale of experts, and which writes to stdout."""
    model = gpt_oss("bf16")
    source = write_checkpoint(tmp_path / "gpt-oss", model.config, model.entries)
    for package in ("vllm", "vllm/model_executor", "vllm/model_executor/models"):
        (tmp_path / "other" / package).mkdir(parents=True)
        (tmp_path / "other" / package / "__init__.py").write_text(STOCK if package == "vllm" else "")
    (tmp_path / "other" / "vllm" / "model_executor" / "models" / "gpt_oss.py").write_text("_GPT_OSS_STREAMED_EXPERT_SUFFIX_TO_SHARD = {}")
    path = os.pathsep.join((str(tmp_path / "other"), str(ROOT)))

    done = subprocess.run(
        [sys.executable, "-m", "workers.vllm.export"],
        input=json.dumps({"source": str(source), "quantize": "nvfp4", "target": str(tmp_path / "deep" / "out"), "device": "cpu"}),
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HUNG_S,
    )

    *_, last = map(json.loads, done.stdout.splitlines())
    assert (done.returncode, last["event"], (tmp_path / "deep").exists()) == (1, "error", False)
    assert last["message"].startswith(f"{source}/model-0")
    assert facts(last["message"]).endswith(".gate_up_proj nvfp4 layers: {experts: mxfp4} experts keep")


def test_the_program_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    request = {"source": str(tmp_path / "none"), "quantize": RECIPE, "target": str(tmp_path / "out")}
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))

    assert program.main() == 1

    (line,) = capsys.readouterr().out.splitlines()
    assert (json.loads(line)["event"], facts(json.loads(line)["message"])) == ("error", f"{tmp_path}/none")
