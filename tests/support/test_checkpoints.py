"""The random checkpoints that other tests and the benches load: they are what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from sparkd.checkpoint import read_checkpoint
from tests.support.checkpoints import MIB, PACKED, SOURCES, Tensor, normal, qwen3_moe, values, write_checkpoint

SMALL = {"layers": 2, "hidden": 128, "experts": 4, "intermediate": 64, "heads": 2, "kv_heads": 1, "shard_bytes": 128 * 1024}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """As the safetensors library reads them, file by file through the index."""
    found: dict[str, torch.Tensor] = {}
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for file in sorted(set(weight_map.values())):
        with safe_open(folder / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                assert weight_map[name] == file
                found[name] = opened.get_tensor(name)
    assert found.keys() == weight_map.keys()
    return found


@pytest.mark.parametrize("source", SOURCES)
def test_safetensors_reads_every_source(tmp_path: Path, source: str) -> None:
    qwen3_moe(tmp_path, source=source, **SMALL)

    found = tensors(tmp_path)

    expert = "model.layers.1.mlp.experts.3.down_proj.weight"
    assert found[expert].shape == (128, 64)
    assert found["model.layers.0.mlp.gate.weight"].dtype == (torch.float16 if source == "f16" else torch.bfloat16)
    value = found[expert].float()
    if source.startswith("fp8"):
        name = "weight_scale_inv" if source == "fp8_block" else "weight_scale"
        value = value * found[expert.replace("weight", name)].float().mean()
    assert float(value.std()) == pytest.approx(0.03, rel=0.3)
    assert all(bool(torch.isfinite(tensor.float()).all()) for tensor in found.values())
    read = read_checkpoint(tmp_path)
    assert (read.quantization.method if read.quantization else None) == (source if source.startswith("fp8") else None)
    assert read.tensors.keys() == found.keys()


def test_shuffled_holds_the_same_tensors_in_another_order(tmp_path: Path) -> None:
    ordered, shuffled = (qwen3_moe(tmp_path / str(how), shuffled=how, **SMALL) for how in (False, True))

    ours, theirs = tensors(ordered), tensors(shuffled)

    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    names = [list(read_checkpoint(folder).tensors) for folder in (ordered, shuffled)]
    assert names[0] != names[1]
    assert len(list(shuffled.glob("*.safetensors"))) > 3


@pytest.mark.parametrize("packed", PACKED)
def test_packed_experts_are_two_tensors_a_layer(tmp_path: Path, packed: str) -> None:
    found = tensors(qwen3_moe(tmp_path, packed=packed, **SMALL))

    shapes = [tuple(found[f"model.layers.0.mlp.experts.{name}"].shape) for name in ("gate_up_proj", "down_proj")]
    assert shapes == ([(4, 128, 128), (4, 128, 64)] if packed == "linear" else [(4, 128, 128), (4, 64, 128)])


def test_what_no_checkpoint_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fp8_block"):
        qwen3_moe(tmp_path, source="fp8_block", packed="linear")


def test_a_tensor_larger_than_a_chunk_is_drawn_in_pieces(tmp_path: Path) -> None:
    entry = Tensor("wide", (3, 6 * MIB), "BF16", normal(1.0))

    pieces = list(values(entry))
    write_checkpoint(tmp_path, {"vocab_size": 300}, [entry, Tensor("odd", (3,), "F32")], shard_bytes=MIB)

    assert len(pieces) == 2
    found = tensors(tmp_path)
    assert torch.equal(found["wide"].view(-1), torch.cat(pieces))
    assert found["odd"].tolist() == [1.0, 1.0, 1.0]


def test_the_tokenizer_reads_bytes(tmp_path: Path) -> None:
    qwen3_moe(tmp_path, **SMALL)

    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))

    assert tokenizer.get_vocab_size() == 512
    text = "Größe: 3 µm\n"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
