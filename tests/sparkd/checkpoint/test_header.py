"""One file's header: what it says, and one sentence for everything that a broken or hostile file may say instead."""

from __future__ import annotations

import hashlib
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparkd.checkpoint.foreign_json import MAX_HEADER_VALUES, MAX_JSON_BYTES
from sparkd.checkpoint.header import DTYPE_BITS, read_header
from sparkd.errors import CheckpointError
from tests.support.checkpoints import header_of, pack, write_shard
from tests.support.facts import lacking

TWO = {"a.weight": ("BF16", (4, 8)), "b.bias": ("F32", (3,))}


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_header_says_where_every_tensor_lies(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "model.safetensors", TWO)
    raw = path.read_bytes()
    shard, tensors = read_header(str(path))

    length = int.from_bytes(raw[:8], "little")
    assert [(t.name, t.dtype, t.shape, t.offset, t.nbytes, t.path) for t in tensors] == [
        ("a.weight", "BF16", (4, 8), 8 + length, 64, str(path)),
        ("b.bias", "F32", (3,), 8 + length + 64, 12, str(path)),
    ]
    assert (shard.path, shard.size_bytes, shard.header_bytes) == (str(path), len(raw), 8 + length)
    assert shard.mtime_ns == path.stat().st_mtime_ns
    assert shard.header_sha256 == hashlib.sha256(raw[: 8 + length]).hexdigest()


def test_tensors_come_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    header = {"late": entry(offsets=[8, 16]), "early": entry(offsets=[0, 8]), "empty": entry(shape=[0, 5], offsets=[8, 8])}
    (tmp_path / "x").write_bytes(pack(header))

    assert [tensor.name for tensor in read_header(str(tmp_path / "x"))[1]] == ["early", "empty", "late"]


def test_scalars_and_a_file_without_tensors_are_read(tmp_path: Path) -> None:
    assert next(iter(read_header(str(write_shard(tmp_path / "x", {"scale": ("F32", ())})))[1])).shape == ()
    assert list(read_header(str(write_shard(tmp_path / "y", {})))[1]) == []


@pytest.mark.parametrize(
    ("raw", "tensor", "facts"),
    [
        (b"", None, ["0 bytes"]),
        ((1 << 40).to_bytes(8, "little") + b"{}", None, ["1099511627776 bytes", "has 10"]),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", None, ["Git LFS"]),
        (pack(b"not json", 0), None, ["JSON", "line 1"]),
        (pack(b"\xff\xfe{}", 0), None, ["UTF-8", "byte 0"]),
        (pack(b"[]", 0), None, ["JSON object"]),
        (pack(b"[" * 100_000, 0), None, ["nested"]),
        (pack(b'{"a": [' + b"{}," * MAX_HEADER_VALUES + b"{}]}", 0), None, [str(MAX_HEADER_VALUES)]),
        (pack(b'{"a": ' + b"9" * 5000 + b"}", 0), None, ["number", "long"]),
        (pack(b'{"__metadata__": 3}', 0), None, ["__metadata__", "JSON object"]),
        (pack({"a": 5}, 0), "a", ["entry"]),
        (pack({"a": {"dtype": "F32", "shape": [2]}}, 8), "a", ["entry"]),
        (pack({"a": entry("F33")}, 8), "a", ["dtype F33"]),
        (pack({"a": entry(shape=[1] * 65)}, 8), "a", ["entry"]),
        (pack({"a": entry(shape=[True, 2])}, 8), "a", ["entry", "[True, 2]"]),
        (pack({"a": entry(shape=[2**63, 2**63])}, 8), "a", ["entry", "[9223372036854775808"]),
        (pack({"a": entry(shape=[2**62] * 60)}, 8), "a", ["entry", "F32"]),
        (pack({"a": entry(offsets=[8, 0])}, 8), "a", ["entry", "[8, 0]"]),
        (pack({"a": entry(offsets=[2**64, 2**64 + 8])}, 8), "a", ["entry"]),
        (pack({"a": entry(shape=[3])}, 8), "a", ["F32", "[3]", "[0, 8]", "bytes"]),
        (pack({"a": entry("F4", [3], [0, 1])}, 1), "a", ["F4", "[3]", "[0, 1]"]),
        (pack({"a": entry()}, 7), "a", ["cut off", "8 bytes", "7 are"]),
        (pack({"a": entry()}, 9), None, ["1 bytes"]),
        (pack({"a": entry(), "b": entry(offsets=[4, 12])}, 12), "b", ["overlaps", "of a"]),
        (pack({"a": entry(), "b": entry(offsets=[12, 20])}, 20), "b", ["hole", "of a"]),
        (pack({"a\0b": entry()}, 8), "'a\\x00b'", ["entry"]),
        (pack({"x" * 9000: entry("F33")}, 8), "x" * 120 + "...", ["dtype F33"]),
    ],
)
def test_what_is_wrong_with_a_file_names_the_tensor_and_the_numbers(
    tmp_path: Path, raw: bytes, tensor: str | None, facts: list[str]
) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        read_header(str(path))

    error = caught.value
    assert (error.file, error.tensor, lacking(error.problem, *facts)) == (str(path), tensor, [])
    assert error.message.startswith(f"{path}: ")
    assert error.cure and error.message.endswith(f"{error.cure}.")
    assert "\n" not in error.message and len(error.message) < 500 + len(str(path))
    error.message.encode()


def test_a_header_above_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write((MAX_JSON_BYTES + 1).to_bytes(8, "little"))
        os.truncate(file.fileno(), MAX_JSON_BYTES + 100)
    with pytest.raises(CheckpointError, match=str(MAX_JSON_BYTES)):
        read_header(str(path))


def test_a_length_that_lies_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes((90_000_000).to_bytes(8, "little") + b"{}")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            read_header(str(path))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "gone").symlink_to(tmp_path / "blob")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, told in (
        ("pipe", "regular"),
        (".", "regular"),
        ("none", "not there"),
        ("gone", "links to"),
        ("loop", "opened"),
    ):
        with pytest.raises(CheckpointError, match=told):
            read_header(str(tmp_path / name))


# Fuzzing

GOOD = pack(header_of({"model.layers.0.mlp.up_proj.weight": ("BF16", (2, 4)), "n": ("F32", (3,)), "e": ("U8", (0,))}))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
numbers = st.integers(-2, 40) | st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, 10**4000])
entries = st.fixed_dictionaries(
    {"dtype": st.sampled_from([*DTYPE_BITS, "F33", "", None]) | json_values},
    optional={
        "shape": st.lists(numbers, max_size=4) | json_values,
        "data_offsets": st.lists(numbers, min_size=2, max_size=2) | json_values,
    },
)


def outcome(folder: Path, raw: bytes) -> None:
    """Either a valid answer about bytes that are there, or CheckpointError."""
    path = folder / "fuzz.safetensors"
    path.write_bytes(raw)
    try:
        shard, tensors = read_header(str(path))
    except CheckpointError as error:
        assert error.message.startswith(str(path)) and "\n" not in error.message
        return
    position = shard.header_bytes
    for tensor in tensors:
        assert tensor.offset == position
        position += tensor.nbytes
    assert position == len(raw)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, len(GOOD) + 20))
@example([(0, GOOD[0])], len(GOOD))
def test_a_good_file_with_bytes_changed_cut_off_or_added(folder: Path, changes: list[tuple[int, int]], length: int) -> None:
    raw = bytearray(GOOD)
    for place, value in changes:
        raw[place] = value
    outcome(folder, bytes(raw[:length].ljust(length, b"\0")))


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), entries | json_values, max_size=4), st.integers(0, 64))
def test_any_header_that_is_json(folder: Path, header: dict[str, Any], data_bytes: int) -> None:
    outcome(folder, pack(json.dumps(header).encode(), data_bytes))
