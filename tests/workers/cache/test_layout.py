"""The layout of a checkpoint that is still to be written: read back by our own strict reader and by the reference library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.checkpoint import read_checkpoint
from sparkd.errors import CheckpointError
from workers.cache.layout import ITEM_BYTES, ShardLayout, index_json, lay_out, neighbours

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


@settings(max_examples=50, deadline=None)
@given(TENSORS, st.integers(1, 400))
def test_every_layout_is_a_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, tuple[str, tuple[int, ...]]], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("layout")
    shards = lay_out(tensors, limit)
    write(folder, shards)

    found = read_checkpoint(folder)

    assert {name: (ref.dtype, ref.shape) for name, ref in found.tensors.items()} == tensors
    places = {tensor.name: tensor for shard in shards for tensor in shard.tensors}
    for name, ref in found.tensors.items():
        assert (ref.offset, ref.nbytes) == (places[name].offset, places[name].nbytes)
        assert ref.path.endswith(shards[places[name].shard].name)
        assert ref.offset % ITEM_BYTES[ref.dtype] == 0
    for shard in shards:
        assert sum(tensor.nbytes for tensor in shard.tensors) <= limit or len([tensor for tensor in shard.tensors if tensor.nbytes]) == 1


def test_tensors_lie_in_the_order_in_which_they_come() -> None:
    tensors = {
        "b.weight_packed": ("U8", (4, 8)),
        "b.weight_global_scale": ("F32", (1,)),
        "b.weight_shape": ("I64", (2,)),
        "odd": ("U8", (3,)),
        "a.weight": ("BF16", (4, 4)),
    }

    (shard,) = lay_out(tensors)

    assert [tensor.name for tensor in shard.tensors] == ["b.weight_packed", "b.weight_shape", "a.weight", "b.weight_global_scale", "odd"]
    assert shard.name == "model-00001-of-00001.safetensors"


def test_a_tensor_larger_than_a_shard_has_one_of_its_own() -> None:
    shards = lay_out({"a": ("U8", (8,)), "b": ("U8", (64,)), "c": ("U8", (8,))}, 16)

    assert [[tensor.name for tensor in shard.tensors] for shard in shards] == [["a"], ["b"], ["c"]]
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
    with pytest.raises(CheckpointError, match=r"^x: .* F4 .*BF16"):
        lay_out({"x": ("F4", (8,))})


def _of_expert(layer: int, expert: int, *matrices: str) -> list[str]:
    return [f"l{layer}.mlp.experts.{expert}.{matrix}.{part}" for matrix in matrices for part in ("weight_packed", "weight_scale")]


@pytest.mark.parametrize("matrices", [("down_proj", "gate_proj", "up_proj"), ("w1", "w2", "w3")])
def test_experts_stand_as_their_parameter_holds_them(matrices: tuple[str, ...]) -> None:
    down, gate, up = sorted(matrices, key=lambda name: ("down" not in name and name != "w2", name))
    names = [
        "embed",
        *(name for expert in (0, 1, 10, 2) for name in _of_expert(0, expert, *matrices)),
        "b.experts_norm",
        "a.mlp.gate.weight",
        *_of_expert(1, 0, *matrices),
    ]

    found = list(neighbours(dict.fromkeys(names, ("U8", (8,)))))

    assert sorted(found) == sorted(names)
    assert (found[0], found[25:27]) == ("embed", ["b.experts_norm", "a.mlp.gate.weight"]), "what is no expert keeps its order"
    at = found.index(f"l0.mlp.experts.0.{gate}.weight_scale")
    assert found[at : at + 8] == [f"l0.mlp.experts.{expert}.{matrix}.weight_scale" for expert in (0, 1, 2, 10) for matrix in (gate, up)]
    at = found.index(f"l0.mlp.experts.0.{down}.weight_packed")
    assert found[at : at + 4] == [f"l0.mlp.experts.{expert}.{down}.weight_packed" for expert in (0, 1, 2, 10)]


def test_experts_of_many_layers_at_once_are_not_waited_for() -> None:
    """Shuffled shards: what arrives far apart stays apart, or the writer would have to hold all of it."""
    names = [name for expert in range(4) for layer in range(30) for name in _of_expert(layer, expert, "down_proj")]

    found = list(neighbours(dict.fromkeys(names, ("U8", (8,)))))

    assert sorted(found) == sorted(names)
    assert max(abs(found.index(name) - at) for at, name in enumerate(names)) < 16
