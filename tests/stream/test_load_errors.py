"""What a user is told, and what is left, when a checkpoint cannot be loaded: a damaged one on its way into vLLM's real model class."""

from __future__ import annotations

import json
import os
import shutil
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkd.errors import CheckpointError
from tests.architectures import llama
from tests.checkpoints import MIB, write_checkpoint
from workers import plugin

with warnings.catch_warnings():
    # vLLM's own warnings are not ours.
    warnings.simplefilter("ignore")
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model

INDEX = "model.safetensors.index.json"
DAMAGED = "model.layers.1.mlp.up_proj"
W = f"{DAMAGED}.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = llama()
    return write_checkpoint(tmp_path_factory.mktemp("sound") / "model", model.config, model.entries, shard_bytes=MIB)


@pytest.fixture(scope="module", autouse=True)
def registered(one_rank: None) -> None:
    plugin.register()


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def weight_map(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def header(folder: Path, change: Callable[[dict[str, Any], bytearray], Any]) -> None:
    """Changes the header and the data of the shard that holds W."""
    path = folder / json.loads((folder / INDEX).read_text())["weight_map"][W]
    raw = path.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    entries, data = json.loads(raw[8:end]), bytearray(raw[end:])
    change(entries, data)
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def truncated(folder: Path) -> None:
    os.truncate(shards(folder)[-1], shards(folder)[-1].stat().st_size - 4096)


def longer_header(folder: Path) -> None:
    path = shards(folder)[0]
    path.write_bytes(struct.pack("<Q", 10**9) + path.read_bytes()[8:])


def reshaped(folder: Path) -> None:
    header(folder, lambda entries, _: entries[W].update(shape=[1024, 128]))


def narrow(folder: Path) -> None:
    header(folder, lambda entries, _: entries[W].update(shape=[2048, 64]))


def longer(folder: Path) -> None:
    header(folder, lambda entries, _: entries[W].update(shape=[1024, 256]))


def of_integers(folder: Path) -> None:
    header(folder, lambda entries, _: entries[W].update(dtype="I16"))


def of_unknown_dtype(folder: Path) -> None:
    header(folder, lambda entries, _: entries[W].update(dtype="BF17"))


def not_finite(folder: Path) -> None:
    def spoil(entries: dict[str, Any], data: bytearray) -> None:
        at = entries[W]["data_offsets"][0] + 100
        data[at : at + 2] = b"\xc0\x7f"

    header(folder, spoil)


def renamed(folder: Path) -> None:
    header(folder, lambda entries, _: entries.update({f"{DAMAGED}s.weight": entries.pop(W)}))
    weight_map(folder, lambda where: where.update({f"{DAMAGED}s.weight": where.pop(W)}))


CASES: list[tuple[str, Callable[[Path], Any], Any, str]] = [
    ("truncated shard", truncated, "nvfp4", r"model-\d+-of-\d+\.safetensors: .*the file is cut off.*Download"),
    ("missing shard", lambda folder: shards(folder)[1].unlink(), "nvfp4", r"model-00002-of-\d+\.safetensors: the file is not there"),
    (
        "header longer than the file",
        longer_header,
        "nvfp4",
        r"model-00001-of-\d+\.safetensors: .*the header is said to be 10\d+ bytes long",
    ),
    (
        "index with a missing tensor",
        lambda folder: weight_map(folder, lambda where: where.update({"model.extra.weight": shards(folder)[0].name})),
        "nvfp4",
        r"model\.extra\.weight: model\.safetensors\.index\.json says.*and it is not",
    ),
    ("unknown dtype", of_unknown_dtype, "nvfp4", rf"{W}: its dtype BF17 is not known"),
    ("integers", of_integers, "nvfp4", rf"{W}: it holds I16, and the model has"),
    ("more than its bytes", longer, "nvfp4", rf"{W}: its offsets hold 262144 bytes"),
    ("another shape", reshaped, "nvfp4", rf"{W}: vLLM's LlamaForCausalLM does not take it as BF16 of shape \[1024, 128\]"),
    ("another shape, int4", reshaped, "int4-g32", rf"{DAMAGED}.*"),
    ("another shape, fp8", reshaped, "fp8", rf"{DAMAGED}.*"),
    ("another shape, plain", reshaped, "bf16", rf"{DAMAGED}.*"),
    ("another name", renamed, "nvfp4", rf"{DAMAGED}s\.weight: .*There is no module or parameter named '[\w.]+' in LlamaModel\)\."),
    ("another name, plain", renamed, "bf16", rf"{DAMAGED}.*"),
    ("NaN", not_finite, "nvfp4", rf"{W}.*NaN or Inf.*fetch it again"),
    ("NaN, int4", not_finite, "int4-g32", rf"{W}.*NaN or Inf.*fetch it again"),
    ("NaN, fp8", not_finite, "fp8", rf"{W}.*NaN or Inf.*fetch it again"),
    (
        "a group that does not divide",
        narrow,
        {"format": "nvfp4", "layers": {"up_proj": "int4-g128"}},
        rf"{DAMAGED}: K=64 is not divisible by the group size 128.*Use int4-g64",
    ),
    (
        "a group that is not built",
        lambda folder: None,
        {"format": "nvfp4", "layers": {"o_proj": {"format": "int4", "group_size": 96}}},
        "group size 96 is not built",
    ),
    ("nf4", lambda folder: None, "nf4", "nf4 is not built yet"),
]


@pytest.mark.parametrize(("damage", "quantize", "sentence"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_one_sentence_and_nothing_left(sound: Path, tmp_path: Path, damage: Callable[[Path], Any], quantize: Any, sentence: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(sound, folder)
    damage(folder)
    progress, cache = tmp_path / "progress", tmp_path / "cache"
    settings = {"quantize": quantize, "cache_dir": str(cache), "progress": str(progress)}
    before = set(os.listdir("/dev/shm"))

    with warnings.catch_warnings(), pytest.raises((ValueError, CheckpointError), match=sentence) as caught:
        warnings.simplefilter("ignore")
        arguments = EngineArgs(
            str(folder),
            load_format=plugin.LOAD_FORMAT,
            model_loader_extra_config=settings,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=256,
        )
        config = arguments.create_engine_config()
        with set_current_vllm_config(config):
            model = initialize_model(config)
            get_model_loader(config.load_config).load_weights(model, config.model_config)

    said = json.loads(progress.read_text())
    assert said["phase"] == "failed"
    assert said["error"]["message"] == str(caught.value)
    assert "\n" not in str(caught.value)
    assert [one.name for one in cache.rglob("*")] in ([], [".lock"])
    assert set(os.listdir("/dev/shm")) <= before
