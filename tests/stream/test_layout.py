"""The layout of a checkpoint that is still to be written: read back by our own strict reader and by the reference library."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.checkpoint import read_checkpoint
from sparkd.errors import CheckpointError
from workers.stream.layout import ITEM_BYTES, ShardLayout, index_json, lay_out

TENSORS = st.dictionaries(
    st.text('abc.äß"\\', min_size=1, max_size=12).filter(str.isprintable),
    st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 9), max_size=3).map(tuple)),
    min_size=1,
    max_size=12,
)


def write(folder: Path, shards: list[ShardLayout]) -> None:
    """The shards as they will be, all zero."""
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_bytes(index_json(shards))
    for shard in shards:
        (folder / shard.name).write_bytes(shard.header + bytes(shard.size_bytes - len(shard.header)))


@settings(deadline=None)
@given(TENSORS, st.integers(1, 400))
def test_every_layout_is_a_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, tuple[str, tuple[int, ...]]], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("layout")
    shards = lay_out(tensors, limit)
    write(folder, shards)

    found = read_checkpoint(folder)

    assert {name: (ref.dtype, ref.shape) for name, ref in found.tensors.items()} == tensors
    slots = {slot.name: slot for shard in shards for slot in shard.slots}
    for name, ref in found.tensors.items():
        assert (ref.offset, ref.nbytes) == (slots[name].offset, slots[name].nbytes)
        assert ref.path.endswith(shards[slots[name].shard].name)
        assert ref.offset % ITEM_BYTES[ref.dtype] == 0
    for shard in shards:
        assert sum(slot.nbytes for slot in shard.slots) <= limit or len([slot for slot in shard.slots if slot.nbytes]) == 1


def test_tensors_lie_in_the_order_in_which_they_come() -> None:
    tensors = {
        "b.weight_packed": ("U8", (4, 8)),
        "b.weight_global_scale": ("F32", (1,)),
        "b.weight_shape": ("I64", (2,)),
        "odd": ("U8", (3,)),
        "a.weight": ("BF16", (4, 4)),
    }

    (shard,) = lay_out(tensors)

    assert [slot.name for slot in shard.slots] == ["b.weight_packed", "b.weight_shape", "a.weight", "b.weight_global_scale", "odd"]
    assert shard.name == "model-00001-of-00001.safetensors"


def test_a_tensor_larger_than_a_shard_has_one_of_its_own() -> None:
    shards = lay_out({"a": ("U8", (8,)), "b": ("U8", (64,)), "c": ("U8", (8,))}, 16)

    assert [[slot.name for slot in shard.slots] for shard in shards] == [["a"], ["b"], ["c"]]
    assert [shard.name for shard in shards] == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert json.loads(index_json(shards))["metadata"] == {"total_size": 80}


def test_the_reference_library_reads_it(tmp_path: Path) -> None:
    from safetensors import safe_open

    tensors = {"x": ("BF16", (3, 5)), "y": ("I64", (2,)), "z": ("F8_E4M3", (7,)), "s": ("F32", ())}
    shards = lay_out(tensors)
    write(tmp_path, shards)

    with safe_open(tmp_path / shards[0].name, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert {name: tuple(file.get_tensor(name).shape) for name in file.keys()} == {name: shape for name, (_, shape) in tensors.items()}  # noqa: SIM118


def test_a_dtype_of_less_than_a_byte_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"^x: a F4 tensor cannot be stored\. Give it one of "):
        lay_out({"x": ("F4", (8,))})


def test_sizes_are_those_of_the_elements() -> None:
    (shard,) = lay_out({"x": ("F16", (5, 3))})

    assert shard.slots[0].nbytes == 2 * math.prod((5, 3))
    assert shard.size_bytes == len(shard.header) + 30
    assert len(shard.header) % 8 == 0
