"""The quantized cache: whole or not at all, whoever dies, fills the disk, reads, writes or evicts at the same time. Real processes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkd.checkpoint import Checkpoint, read_checkpoint
from tests.support.checkpoints import Tensor, normal, write_checkpoint
from tests.support.facts import facts
from tests.support.waiting import HUNG_S
from workers.cache import manifest, store
from workers.cache import writer as cache_writer
from workers.cache.manifest import MANIFEST, USED, cache_key, entry_name, model_name, on_device
from workers.cache.store import (
    CachedCheckpoint,
    entries,
    fault_of,
    find,
    has_entry,
    locked,
    make_room,
    remove,
    sweep,
    written_now,
)
from workers.cache.writer import CODES, CacheContent, CacheWriter, ShardWriter, Staging
from workers.files import direct_file

ROOT = Path(__file__).resolve().parents[3]
RECIPE = {"format": "nvfp4", "layers": []}
DESCRIBED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 64, "quantization_config": {"quant_method": "fp8"}}
MODULES = [f"model.layers.{layer}.mlp.{name}_proj" for layer in range(3) for name in ("gate", "up")]
PLAIN = "model.embed_tokens.weight"


def swept(cache_dir: str) -> int:
    with locked(cache_dir):
        return sweep(cache_dir)


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    entries = [Tensor(PLAIN, (64, 64), draw=normal(1.0)), *(Tensor(f"{module}.weight", (64, 64), draw=normal(1.0)) for module in MODULES)]
    folder = write_checkpoint(tmp_path / "models" / "Tiny-1B", CONFIG, entries, shard_bytes=20_000)
    (folder / "hf_quant_config.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (folder / "pytorch_model.bin").write_bytes(b"old")
    return read_checkpoint(folder)


@pytest.fixture
def cache_dir(tmp_path: Path) -> str:
    return str(tmp_path / "quantized")


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_writer, "SHARD_BYTES", 8000)


@pytest.fixture(autouse=True)
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk of 1 TiB that is half empty, whatever this machine has."""
    free_disk(monkeypatch, 512 << 30)


def free_disk(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(1 << 40, (1 << 40) - free_bytes, free_bytes))


def quantized(source: Checkpoint) -> dict[str, torch.Tensor]:
    """What a load hands over, in its order; the values only have to be told apart."""
    from safetensors import safe_open

    made: dict[str, torch.Tensor] = {}
    with safe_open(source.tensors[PLAIN].path, "pt") as file:
        made[PLAIN] = file.get_tensor(PLAIN)
    for number, module in enumerate(MODULES):
        made[f"{module}.weight_packed"] = torch.full((64, 32), number, dtype=torch.uint8)
        made[f"{module}.weight_scale"] = torch.full((64, 4), number / 4).to(torch.float8_e4m3fn)
        made[f"{module}.weight_global_scale"] = torch.tensor([number + 0.5])
    return made


def layout(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (CODES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}


def writer(
    cache_dir: str, source: Checkpoint, tensors: Mapping[str, torch.Tensor], recipe: Mapping[str, Any] = RECIPE, **more: Any
) -> CacheWriter:
    named = {name: more.pop(name) for name in ("notes",) if name in more}
    content = CacheContent(source, recipe, None, DESCRIBED, layout(tensors), **named)
    return CacheWriter(cache_dir, content, **more)


def written(cache_dir: str, source: Checkpoint, recipe: Mapping[str, Any] = RECIPE, **more: Any) -> CacheWriter:
    tensors = quantized(source)
    made = writer(cache_dir, source, tensors, recipe, **more)
    for name, tensor in tensors.items():
        made.add([name], tensor.unsqueeze(0))
    made.finish()
    return made


def found(cache_dir: str, source: Checkpoint, recipe: Mapping[str, Any] = RECIPE) -> tuple[CachedCheckpoint | None, str]:
    said: list[str] = []
    return find(cache_dir, source, recipe, say=said.append), " ".join(said)


def left(cache_dir: str) -> list[str]:
    """What lies in the cache's folder, but for its lock."""
    return sorted(name for name in os.listdir(cache_dir) if name != ".lock") if os.path.isdir(cache_dir) else []


# What is written


def test_a_cache_is_a_checkpoint_of_its_own(cache_dir: str, source: Checkpoint) -> None:
    from safetensors import safe_open

    states: list[tuple[str, int, str | None]] = []
    made = written(cache_dir, source, notes={"vllm": "0.32.0"}, on_state=lambda *state: states.append(state))

    assert states == [("writing", 0, None), ("written", made.bytes_written, None)]
    folder = Path(made.folder)
    assert left(cache_dir) == [folder.name]
    own = read_checkpoint(folder)
    for name, tensor in quantized(source).items():
        with safe_open(own.tensors[name].path, "pt") as file:
            assert torch.equal(file.get_tensor(name).view(torch.uint8), tensor.view(torch.uint8)), name
    assert own.config == {**CONFIG, "quantization_config": DESCRIBED}
    assert {path.name for path in folder.iterdir() if not path.name.startswith("model")} == {
        "additional_chat_templates",
        "config.json",
        MANIFEST,
        *(path.name for path in Path(source.folder).glob("tokenizer*")),
        *(path.name for path in Path(source.folder).glob("special*")),
        USED,
    }
    assert (folder / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"
    told = json.loads((folder / MANIFEST).read_text())
    assert (told["version"], told["code"], told["format"], told["recipe"], told["notes"]) == (1, 3, "nvfp4", RECIPE, {"vllm": "0.32.0"})
    assert told["source"]["folder"] == source.folder
    assert {file["name"] for file in told["files"]} == {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name not in (MANIFEST, USED)
    }
    assert made.bytes_written == sum(shard.size_bytes for shard in own.shards)


@pytest.mark.parametrize(("notes", "count"), [({}, 0), ({store.UNMEASURED_INPUTS: 3}, 3)])
def test_how_many_inputs_its_writer_did_not_measure_is_kept(cache_dir: str, source: Checkpoint, notes: dict[str, int], count: int) -> None:
    written(cache_dir, source, notes=notes)
    cached, _ = found(cache_dir, source)
    assert cached is not None
    with cached:
        assert cached.unmeasured_inputs == count


def test_chunks_of_a_large_tensor(cache_dir: str, source: Checkpoint) -> None:
    tensors = quantized(source)
    made = writer(cache_dir, source, tensors)
    embedding = tensors.pop(PLAIN).view(torch.uint8).reshape(-1)
    for start in range(0, embedding.numel(), 1000):
        # As a view into the reader's ring: it is something else as soon as it was handed over.
        chunk = embedding[start : start + 1000].clone()
        made.add_chunk(PLAIN, start, chunk)
        chunk.zero_()
    for name, tensor in tensors.items():
        made.add([name], tensor.unsqueeze(0))

    assert made.finish() == "written"
    there, _ = found(cache_dir, source)
    assert there is not None
    with there:
        ref = there.checkpoint.tensors[PLAIN]
        assert Path(ref.path).read_bytes()[ref.offset : ref.offset + ref.nbytes] == bytes(embedding)


def test_a_tensor_that_was_not_laid_out_or_never_came_costs_the_cache_only(cache_dir: str, source: Checkpoint) -> None:
    tensors = quantized(source)
    odd = f"{MODULES[1]}.weight_packed"
    wide, fewer = writer(cache_dir, source, tensors), writer(f"{cache_dir}-2", source, tensors)

    wide.add(["stranger"], torch.zeros(1, 64, 33, dtype=torch.uint8))
    del tensors[odd]
    for name, tensor in tensors.items():
        fewer.add([name], tensor.unsqueeze(0))

    assert (wide.state, wide.finish(), fewer.finish()) == ("failed", "failed", "failed")
    assert "stranger" in str(wide.reason)
    assert facts(fewer.reason) == f"Tiny-1B {odd}"
    assert left(cache_dir) == left(f"{cache_dir}-2") == []


@pytest.mark.parametrize("when", ["put", "close"])
def test_no_error_of_the_writer_ends_a_load(cache_dir: str, source: Checkpoint, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("odd-7")

    tensors = quantized(source)
    made = writer(cache_dir, source, tensors)
    monkeypatch.setattr(ShardWriter, "put", fail)
    if when == "close":
        close = ShardWriter.close
        monkeypatch.setattr(ShardWriter, "close", lambda self: (close(self), fail()))
    made.add([PLAIN], tensors[PLAIN].unsqueeze(0))
    made.add([PLAIN], tensors[PLAIN].unsqueeze(0))

    assert (made.state, made.finish()) == ("failed", "failed")
    assert "KeyError" in str(made.reason) and "odd-7" in str(made.reason)
    assert left(cache_dir) == []


def test_a_load_that_is_cancelled_leaves_nothing(cache_dir: str, source: Checkpoint) -> None:
    tensors = quantized(source)
    made = writer(cache_dir, source, tensors)
    made.add([PLAIN], tensors[PLAIN].unsqueeze(0))

    made.abandon("cancelled by 7")
    made.add([PLAIN], tensors[PLAIN].unsqueeze(0))

    assert made.finish() == "failed"
    assert facts(made.reason) == "Tiny-1B 7"
    assert left(cache_dir) == []


def test_a_load_that_waits_for_the_disk_says_so_once(
    cache_dir: str, source: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk takes a second block once it was said, with a ring of one."""
    monkeypatch.setattr(cache_writer, "SLOW_S", 0.0)
    monkeypatch.setattr("workers.cache.writer.LOOK_S", 0.001)
    said = threading.Event()
    real = direct_file.DirectFile.write

    def write(file: Any, offset: int, data: memoryview) -> None:
        assert not offset or said.wait(HUNG_S)
        real(file, offset, data)

    monkeypatch.setattr(direct_file.DirectFile, "write", write)
    states: list[tuple[str, int, str | None]] = []

    def on_state(state: str, size_bytes: int, why: str | None) -> None:
        states.append((state, size_bytes, why))
        if why is not None:
            said.set()

    caplog.set_level("INFO")
    made = written(cache_dir, source, on_state=on_state, staging=Staging(4096, 4096))

    (waiting,) = [why for state, _, why in states if state == "writing" and why is not None]
    assert facts(waiting) == cache_dir
    assert [one.message for one in caplog.records].count(f"sparkd: {waiting}.") == 1
    assert states[-1] == ("written", made.bytes_written, None)


# The second start


def test_the_second_start_finds_it_and_nobody_removes_it_meanwhile(cache_dir: str, source: Checkpoint) -> None:
    made = written(cache_dir, source)
    os.utime(os.path.join(made.folder, USED), (1, 1))

    there, why = found(cache_dir, source)

    assert there is not None, why
    with there:
        assert there.folder == made.folder
        assert os.stat(os.path.join(made.folder, USED)).st_mtime > 1e9
        assert not remove(there.folder)
    there.close()
    assert remove(made.folder)
    assert left(cache_dir) == []


def test_another_recipe_slice_folder_or_device_is_another_entry(source: Checkpoint, tmp_path: Path) -> None:
    other = read_checkpoint(shutil.copytree(source.folder, tmp_path / "other"))

    keys = {
        cache_key(source, RECIPE),
        cache_key(source, {**RECIPE, "format": "mxfp4"}),
        cache_key(source, RECIPE, (0, 2)),
        cache_key(source, RECIPE, (1, 2)),
        cache_key(other, RECIPE),
        cache_key(source, on_device(RECIPE, "cpu")),
    }

    assert len(keys) == 6
    assert cache_key(source, on_device(RECIPE, "cuda")) == cache_key(source, RECIPE)
    assert cache_key(source, RECIPE) == cache_key(source, dict(reversed(RECIPE.items())))
    assert entry_name(source, RECIPE) == f"tiny-1b-nvfp4-{cache_key(source, RECIPE)}"
    assert entry_name(source, {"format": "bf16", "layers": [{}]}).startswith("tiny-1b-bf16-mixed-")
    assert model_name("/hub/models--Qwen--Qwen3-8B/snapshots/0123abc") == "qwen3-8b"
    assert model_name("/models/ä ö/") == "model"


def damage(what: str, folder: Path, source: Path) -> None:
    """Each a way in which an entry is not what it was, or not of what is there now."""
    shard = sorted(folder.glob("*.safetensors"))[-1]
    content = json.loads((folder / MANIFEST).read_text())
    match what:
        case "cut":
            os.truncate(shard, shard.stat().st_size - 1)
        case "gone":
            shard.unlink()
        case "header":
            shard.write_bytes(shard.read_bytes().replace(b'"U8"', b'"I8"', 1))
        case "config":
            (folder / "config.json").write_bytes((folder / "config.json").read_bytes().replace(b"nvfp4", b"mxfp4"))
        case "manifest":
            (folder / MANIFEST).write_text('{"version": 1}')
        case "version":
            (folder / MANIFEST).write_text(json.dumps({**content, "version": 2}))
        case "code":
            (folder / MANIFEST).write_text(json.dumps({**content, "code": 0}))
        case "source time":
            os.utime(sorted(source.glob("*.safetensors"))[0], (1, 1))
        case "source config":
            (source / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 128}))


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("cut", "SHARD"),
        ("gone", "SHARD"),
        ("header", "model-00003-of-00003.safetensors"),
        ("config", "config.json"),
        ("manifest", f"FOLDER/{MANIFEST}"),
        ("version", f"FOLDER/{MANIFEST} 2 1"),
        ("code", f"0 {manifest.CODE_VERSION}"),
        ("source time", "model-00001-of-00004.safetensors"),
        ("source config", "config.json"),
    ],
)
def test_what_is_not_valid_is_named_and_removed(cache_dir: str, source: Checkpoint, what: str, named: str) -> None:
    folder = Path(written(cache_dir, source).folder)
    shard = sorted(folder.glob("*.safetensors"))[-1]
    damage(what, folder, Path(source.folder))

    (entry,) = entries(cache_dir)
    fault = fault_of(entry)
    there, why = found(cache_dir, read_checkpoint(source.folder))

    assert there is None
    assert facts(why).startswith(f"{folder} {named.replace('SHARD', str(shard)).replace('FOLDER', str(folder))}".strip())
    assert fault is not None
    assert facts(why).endswith(facts(fault))
    assert left(cache_dir) == []
    assert written(cache_dir, read_checkpoint(source.folder)).state == "written"


def test_an_entry_that_was_replaced_since_it_was_found_invalid_stays(
    cache_dir: str, source: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(written(cache_dir, source).folder)
    damage("code", folder, Path(source.folder))
    check = store._check

    def replaced(*of: Any) -> Any:
        monkeypatch.setattr(store, "_check", check)
        answer = check(*of)
        folder.rename(folder.parent / ".gone-old")
        assert written(cache_dir, source).state == "written"
        return answer

    monkeypatch.setattr(store, "_check", replaced)
    assert found(cache_dir, source)[0] is None
    there, why = found(cache_dir, source)
    assert there is not None, why
    there.close()


@pytest.mark.parametrize("name", ["model-00001-of-00003.safetensors", "config.json", MANIFEST])
@pytest.mark.parametrize("instead", ["/proc/self/mem", MANIFEST], ids=["EIO when it is read", "ELOOP when it is opened"])
def test_what_the_system_does_not_give_now_stays_and_is_used_the_next_time(
    cache_dir: str, source: Checkpoint, tmp_path: Path, name: str, instead: str
) -> None:
    folder = Path(written(cache_dir, source).folder)
    file, aside = folder / name, tmp_path / "aside"
    file.rename(aside)
    file.symlink_to(instead if instead.startswith("/") else name)

    there, why = found(cache_dir, source)
    assert (there, left(cache_dir)) == (None, [folder.name]), why

    aside.rename(file)
    there, why = found(cache_dir, source)
    assert there is not None, why
    there.close()


def test_a_source_that_was_read_is_not_read_again_to_find_its_entry(cache_dir: str, source: Checkpoint) -> None:
    written(cache_dir, source)
    shutil.rmtree(source.folder)  # whatever becomes of it after its headers were read

    there, why = found(cache_dir, source)
    assert there is not None, why
    there.close()


def test_a_source_with_other_files_is_another_one(source: Checkpoint) -> None:
    before = manifest.CheckpointIdentity.of(source)
    fewer = before.change(manifest.CheckpointIdentity(before.folder, before.shards[1:], before.config_sha256))
    assert before.change(before) is None
    assert facts(fewer) == f"{len(before.shards) - 1} {len(before.shards)} {before.shards[0].name}"


def test_whether_an_entry_may_be_there_is_known_from_names_alone(cache_dir: str, source: Checkpoint) -> None:
    assert not has_entry(cache_dir, source.folder, RECIPE)
    assert (found(cache_dir, source)[0], entries(cache_dir)) == (None, [])
    written(cache_dir, source)
    assert has_entry(cache_dir, source.folder, RECIPE)
    assert has_entry(cache_dir, "Someone/Tiny-1B", RECIPE)  # the same model by its hub id
    assert not has_entry(cache_dir, source.folder, {**RECIPE, "format": "mxfp4"})
    assert not has_entry(cache_dir, "/models/tiny", RECIPE)


# Room


def test_the_one_used_longest_ago_makes_room(cache_dir: str, source: Checkpoint) -> None:
    recipes = [{**RECIPE, "format": name} for name in ("nvfp4", "mxfp4", "int4-g64")]
    folders = [written(cache_dir, source, recipe).folder for recipe in recipes]
    for age, folder in enumerate(folders):
        os.utime(os.path.join(folder, USED), (1000 - age, 1000 - age))
    size = sum(entry.size_bytes for entry in entries(cache_dir))

    made = written(cache_dir, source, {**RECIPE, "format": "fp8"}, limit_bytes=size + cache_writer.MARGIN_BYTES)

    assert made.state == "written"
    assert {entry.folder for entry in entries(cache_dir)} == {*folders[:2], made.folder}


def test_what_is_being_read_is_never_evicted(cache_dir: str, source: Checkpoint) -> None:
    recipes = [{**RECIPE, "format": name} for name in ("nvfp4", "mxfp4")]
    folders = [written(cache_dir, source, recipe).folder for recipe in recipes]
    there, _ = found(cache_dir, source, recipes[0])
    assert there is not None
    os.utime(os.path.join(folders[0], USED), (1, 1))
    size = sum(entry.size_bytes for entry in entries(cache_dir))

    with there:
        made = written(cache_dir, source, {**RECIPE, "format": "fp8"}, limit_bytes=size + cache_writer.MARGIN_BYTES)
        kept = {entry.folder for entry in entries(cache_dir)}
        none = written(cache_dir, source, {**RECIPE, "format": "fp8-block"}, limit_bytes=size // 2 + cache_writer.MARGIN_BYTES)

    assert kept == {folders[0], made.folder}
    assert none.state == "skipped"
    assert facts(none.reason) == "Tiny-1B 0.0 0.0 quantized_cache.limit_gib"
    assert {entry.folder for entry in entries(cache_dir)} == kept

    larger = written(cache_dir, source, {**RECIPE, "format": "fp8-block"}, limit_bytes=1000)
    assert larger.state == "skipped"
    assert larger.reason != none.reason, "it is in nobody's use: it would not fit an empty cache"
    assert {entry.folder for entry in entries(cache_dir)} == kept


def test_a_disk_without_room_is_said_before_anything_is_written(
    cache_dir: str, source: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_disk(monkeypatch, 20 << 30)
    made = written(cache_dir, source)
    assert made.state == "skipped"
    assert facts(made.reason) == f"Tiny-1B 0.0 {cache_dir} 20.0 20.5 quantized_cache.dir"
    assert left(cache_dir) == []


def test_a_disk_whose_reserve_is_reached_evicts(cache_dir: str, source: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    old = written(cache_dir, source)
    (entry,) = entries(cache_dir)
    free_disk(monkeypatch, int((1 << 40) * store.RESERVE_FRACTION))
    with locked(cache_dir):
        assert make_room(cache_dir, entry.size_bytes + 1, None) is not None
        assert os.path.isdir(old.folder)
        assert make_room(cache_dir, entry.size_bytes, None) is None

    assert left(cache_dir) == []


# Trouble


def test_a_disk_that_becomes_full_drops_the_cache_and_frees_what_it_took(
    cache_dir: str, source: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev
    calls: list[int] = []

    def full(fd: int, data: Sequence[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(direct_file.os, "pwritev", full)
    made = written(cache_dir, source)

    assert made.state == "failed"
    assert facts(made.reason) == f"Tiny-1B {cache_dir} quantized_cache.dir"
    assert left(cache_dir) == []


def test_a_cache_folder_that_cannot_be_made(source: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    made = written(str(tmp_path / "file" / "quantized"), source)

    assert made.state == "failed"
    assert facts(made.reason) == f"Tiny-1B {tmp_path}/file/quantized quantized_cache.dir"


@pytest.mark.parametrize("odd", [False, True])
def test_experts_that_come_together_are_one_part_of_the_file(cache_dir: str, source: Checkpoint, odd: bool) -> None:
    names = [f"l.experts.{expert}.{matrix}.weight_scale" for expert in range(4) for matrix in ("gate_proj", "up_proj")]
    stacked = torch.randint(0, 255, (8, 6, 16), dtype=torch.uint8)
    made = CacheWriter(cache_dir, CacheContent(source, RECIPE, None, DESCRIBED, dict.fromkeys(reversed(names), ("U8", (6, 16)))))
    made.add([*names[:5], "stranger"] if odd else names[:6], stacked[:6])
    made.add(names[6:], stacked[6:])
    made.finish()

    if odd:
        assert made.state == "failed"
        assert "stranger" in str(made.reason)
        return
    with found(cache_dir, source)[0] as cached:  # type: ignore[union-attr]
        assert list(cached.checkpoint.tensors) == names
        for name, value in zip(names, stacked, strict=True):
            ref = cached.checkpoint.tensors[name]
            with open(ref.path, "rb") as file:
                file.seek(ref.offset)
                assert file.read(ref.nbytes) == value.numpy().tobytes()


def test_a_source_that_is_gone_fails_the_cache_only(cache_dir: str, source: Checkpoint) -> None:
    tensors = quantized(source)
    written(cache_dir, source)
    shutil.rmtree(source.folder)

    (entry,) = entries(cache_dir)
    assert facts(fault_of(entry)) == source.folder
    made = writer(cache_dir, source, tensors, {**RECIPE, "format": "fp8"})

    assert made.state == "failed"
    assert facts(made.reason).startswith(f"Tiny-1B {source.folder}")


# Two at once, and one that dies

CHILD = """
import os, shutil, sys, threading
import torch
from sparkd.checkpoint import read_checkpoint
from workers.cache import store as cache
from workers.cache.writer import CacheContent, CacheWriter
cache.shutil.disk_usage = lambda path: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40)
cache_dir, folder = sys.argv[1:]
layout = {"a": ("U8", (4 << 20,)), "b": ("U8", (4 << 20,))}
made = CacheWriter(cache_dir, CacheContent(read_checkpoint(folder), {"format": "nvfp4", "layers": []}, None, {}, layout))
made.add(["a"], torch.zeros(1, 4 << 20, dtype=torch.uint8))
made._writer.flush()
print("half", flush=True)
sys.stdin.readline()
made.add(["b"], torch.zeros(1, 4 << 20, dtype=torch.uint8))
print(made.finish(), flush=True)
"""


@pytest.fixture
def half(cache_dir: str, source: Checkpoint) -> Iterator[subprocess.Popen[str]]:
    """Another process that has written half of an entry and waits for a line."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, cache_dir, source.folder], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == "half\n"
    with child:
        yield child
        child.kill()


def test_a_second_writer_of_the_same_entry_gives_up_and_sweeps_nothing(
    cache_dir: str, source: Checkpoint, half: subprocess.Popen[str]
) -> None:
    second = written(cache_dir, source)
    other = written(cache_dir, source, {**RECIPE, "format": "fp8"})
    assert (second.state, other.state) == ("skipped", "written")
    assert second.reason is not None

    os.mkdir(os.path.join(cache_dir, ".gone-x-1"))
    assert swept(cache_dir) == 0
    assert [name.startswith(".writing-") for name in left(cache_dir)] == [True, True, False]

    assert half.communicate("go on\n", timeout=HUNG_S)[0] == "written\n"
    assert len(entries(cache_dir)) == 2
    third = written(cache_dir, source)
    assert third.state == "skipped"
    assert third.reason not in (None, second.reason)


def test_a_writer_that_is_killed_leaves_nothing_that_counts(
    cache_dir: str, source: Checkpoint, half: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
) -> None:
    half.send_signal(signal.SIGKILL)
    half.wait(HUNG_S)
    assert (entries(cache_dir), found(cache_dir, source)[0]) == ([], None)
    assert [name for name in left(cache_dir) if not name.startswith(".writing-")] == []
    assert written_now(cache_dir) > 8 << 20

    caplog.set_level("INFO")
    with locked(cache_dir):
        assert make_room(cache_dir, 2 << 20, 3 << 20) is None, "it does not count towards the limit"
    assert (left(cache_dir), written_now(cache_dir), swept(cache_dir)) == ([], 0, 0)
    assert [(one.levelname, facts(one.message)) for one in caplog.records] == [("INFO", f"0.0 {cache_dir}")]
    assert written(cache_dir, source).state == "written"


def test_what_is_no_entry_is_left_alone(cache_dir: str, source: Checkpoint) -> None:
    made = written(cache_dir, source)
    os.mkdir(os.path.join(cache_dir, "notes"))
    Path(cache_dir, "README-0123456789abcdef").write_text("not a folder")

    assert [entry.folder for entry in entries(cache_dir)] == [made.folder]
    with locked(cache_dir):
        sweep(cache_dir)
    assert "notes" in left(cache_dir)
