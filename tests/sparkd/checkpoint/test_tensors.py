"""Tensors that are alike, the file that an index names for each, and copies of one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sparkd.checkpoint import read_checkpoint, read_index
from sparkd.checkpoint.tensors import TensorGroup, TensorRef, alike
from sparkd.errors import CheckpointError
from tests.support.checkpoints import write_folder, write_shard


def test_alike_tensors_are_counted() -> None:
    up, down = (TensorRef(f"l.0.experts.0.{name}", "BF16", (2, 2), "/m/a", 0, 8) for name in ("up", "down"))
    other = TensorRef("l.0.experts.3.up", "F32", (3,), "/m/b", 0, 12)
    tensors = [up, down, up._replace(name="l.0.experts.1.up"), other]

    assert list(alike({tensor.name: tensor for tensor in tensors}, re.compile(r"\.experts\.\d+\."), ".experts.0.")) == [
        TensorGroup("l.0.experts.0.up", up, 2),
        TensorGroup("l.0.experts.0.down", down, 1),
        TensorGroup("l.0.experts.0.up", other, 1),
    ]


@pytest.mark.parametrize("raw", ["[]", "{", '{"weight_map": {}}', '{"weight_map": {"a": ".."}}', '{"weight_map": {"a": 3}}'])
def test_what_is_no_index_is_refused(raw: str) -> None:
    with pytest.raises(CheckpointError):
        read_index(raw.encode(), "/m/index")


def test_an_index_names_the_file_of_each_tensor() -> None:
    weight_map = {"b": "y.safetensors", "a.w": "x.safetensors"}
    assert read_index(json.dumps({"metadata": {"total_size": 3}, "weight_map": weight_map}).encode(), "/m/index") == weight_map


# Copies of a tensor

ONE = {"a": ("BF16", (4,)), "b": ("F32", (2,))}


def test_a_copy_that_the_index_has_elsewhere_does_not_count(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"x.safetensors": ONE, "y.safetensors": {"b": ("F32", (3,)), "stray": ("U8", (1,))}})
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}')
    found = read_checkpoint(folder).tensors

    assert [(name, ref.shape, Path(ref.path).name) for name, ref in found.items()] == [
        ("a", (4,), "x.safetensors"),
        ("b", (3,), "y.safetensors"),
        ("stray", (1,), "y.safetensors"),
    ]
    assert (len(found), found["b"].nbytes) == (3, 12)


@pytest.mark.parametrize(
    "weight_map",
    [
        {"a": "x.safetensors", "gone": "x.safetensors", "b": "x.safetensors", "c": "y.safetensors"},
        {"a": "y.safetensors", "b": "x.safetensors", "c": "x.safetensors"},
    ],
)
def test_what_the_shards_have_counts_whatever_the_index_says(tmp_path: Path, weight_map: dict[str, str]) -> None:
    """vLLM opens the files that the index names, and takes all tensors of theirs."""
    folder = write_folder(tmp_path, {"x.safetensors": ONE, "y.safetensors": {"c": ("U8", (1,))}})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = read_checkpoint(folder).tensors
    assert {name: Path(ref.path).name for name, ref in found.items()} == {"a": "x.safetensors", "b": "x.safetensors", "c": "y.safetensors"}


def test_a_copy_that_the_index_does_not_have_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"x.safetensors": ONE, "y.safetensors": {"b": ("F32", (2,)), "c": ("U8", (1,))}})
    write_shard(folder / "z.safetensors", {"d": ("U8", (1,))})
    weight_map = {"a": "x.safetensors", "c": "y.safetensors", "d": "z.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    with pytest.raises(CheckpointError, match=r"x\.safetensors") as caught:
        read_checkpoint(folder)
    assert (caught.value.file, caught.value.tensor) == (str(folder / "y.safetensors"), "b")
