"""The compact table of tensors: a mapping like any other, whichever way its files were read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparkd.checkpoint import header as safetensors
from sparkd.checkpoint import index, read_checkpoint
from sparkd.checkpoint.header import parse_header
from sparkd.checkpoint.tensors import FileTensors, TensorGroup, TensorKind, TensorRef, Tensors, alike
from sparkd.errors import CheckpointError
from tests.support.checkpoints import header_of, write_folder, write_shard

BF16 = TensorKind("BF16", (2, 2), 8)
F32 = TensorKind("F32", (3,), 12)
EXPERT = re.compile(r"\.experts\.\d+\.(?=.)")


def file_of(path: str, *members: tuple[str, TensorKind], left_out: Sequence[str] = ()) -> FileTensors:
    names = "\n".join(name for name, _ in members).encode()
    return FileTensors(path, 100, names, tuple(kind for _, kind in members), frozenset(left_out))


A = file_of("/m/a", ("x.0.w", BF16), ("x.1.w", F32), ("né", BF16))
B = file_of("/m/b", ("x.1.w", BF16), ("y", F32), left_out=["x.1.w"])
REFS = [
    TensorRef("x.0.w", "BF16", (2, 2), "/m/a", 100, 8),
    TensorRef("x.1.w", "F32", (3,), "/m/a", 108, 12),
    TensorRef("né", "BF16", (2, 2), "/m/a", 120, 8),
    TensorRef("y", "F32", (3,), "/m/b", 108, 12),
]


@pytest.mark.parametrize("looked_up", [False, True])
def test_it_is_a_mapping(looked_up: bool) -> None:
    tensors = Tensors([A, file_of("/m/empty"), B])
    if looked_up:
        assert tensors["y"] == REFS[3] and "y" in tensors and "z" not in tensors

    assert (list(tensors), list(tensors.values()), len(tensors)) == ([ref.name for ref in REFS], REFS, 4)
    assert list(tensors.items()) == [(ref.name, ref) for ref in REFS]
    assert tensors == {ref.name: ref for ref in REFS} and tensors.keys() == {ref.name for ref in REFS}
    assert tensors.get("z") is None and ("y", REFS[3]) in tensors.items() and REFS[0] in tensors.values()
    with pytest.raises(KeyError, match="z"):
        tensors["z"]
    assert not Tensors([]) and not Tensors([file_of("/m/empty")])


def experts(path: str, layer: int, *numbers: int, kind: TensorKind = BF16) -> FileTensors:
    return file_of(path, *((f"l.{layer}.experts.{number}.{which}", kind) for number in numbers for which in ("up", "down")))


def test_alike_tensors_are_counted() -> None:
    files = [experts("/m/a", 0, 0, 1), experts("/m/b", 0, 2), experts("/m/c", 0, 3, kind=F32), file_of("/m/d", ("l.experts.7.", BF16))]
    table = Tensors(files)
    want = [
        TensorGroup("l.0.experts.0.up", TensorRef("l.0.experts.0.up", "BF16", (2, 2), "/m/a", 100, 8), 3),
        TensorGroup("l.0.experts.0.down", TensorRef("l.0.experts.0.down", "BF16", (2, 2), "/m/a", 108, 8), 3),
        TensorGroup("l.0.experts.0.up", TensorRef("l.0.experts.3.up", "F32", (3,), "/m/c", 100, 12), 1),
        TensorGroup("l.0.experts.0.down", TensorRef("l.0.experts.3.down", "F32", (3,), "/m/c", 112, 12), 1),
        TensorGroup("l.experts.7.", TensorRef("l.experts.7.", "BF16", (2, 2), "/m/d", 100, 8), 1),
    ]

    assert list(alike(table, EXPERT, ".experts.0.")) == want
    assert list(alike(dict(table), EXPERT, ".experts.0.")) == want
    assert list(alike(Tensors([A, B]), re.compile(r"\.\d"), ".0")) == [
        TensorGroup("x.0.w", REFS[0], 1), TensorGroup("x.0.w", REFS[1], 1), TensorGroup("né", REFS[2], 1), TensorGroup("y", REFS[3], 1),
    ]  # fmt: skip


# What is recognised as a whole is what is taken apart entry by entry

names = st.sampled_from(["a", "b.weight", "c d", "é", "__metadata__", 'q"', "n\\", "\t", "", "a,b", "x}", "]},"])
shapes = st.lists(st.sampled_from([0, 1, 2, 3, 8]), max_size=3)
tensors_ = st.dictionaries(names, st.tuples(st.sampled_from(["F32", "BF16", "F4", "U8", "f32", "F33"]), shapes), max_size=5)


def canonical(tensors: dict[str, tuple[str, list[int]]], metadata: Any = None) -> bytes:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    known = {name: (dtype if dtype in safetensors.DTYPE_BITS else "U8", shape) for name, (dtype, shape) in tensors.items()}
    header |= {name: entry | {"dtype": tensors[name][0]} for name, entry in header_of(known).items() if name in tensors}
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()


@st.composite
def changes_of(draw: st.DrawFn, good: bytes) -> bytes:
    """With some bytes changed and some taken out."""
    raw = bytearray(good)
    for place, value in draw(st.lists(st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255)), max_size=3)):
        raw[place] = value
    at = draw(st.integers(0, len(good) - 1))
    del raw[at : at + draw(st.integers(0, 9))]
    return bytes(raw)


def both(header: bytes, size_bytes: int) -> None:
    begin = 8 + len(header)
    recognised = safetensors._recognised(header, "/m/x", size_bytes - begin)
    try:
        want = safetensors._taken_apart(header, "/m/x", size_bytes - begin)
    except CheckpointError:
        assert recognised is None
    else:
        assert recognised is None or (recognised == want and list(recognised) == list(want))


@settings(max_examples=80, deadline=None)
@given(tensors_, st.none() | st.dictionaries(names, names, max_size=2) | st.integers(), st.integers(-1, 1), st.integers(0, 3))
def test_headers_in_the_librarys_layout(tensors: Any, metadata: Any, more: int, pad: int) -> None:
    header = canonical(tensors, metadata) + b" " * pad
    data_bytes = sum(int(end) for end in re.findall(rb",([0-9]+)\]\}\}? *$", header))
    both(header, 8 + len(header) + data_bytes + more)


GOOD = canonical({"a": ("BF16", [2, 4]), "b.weight": ("F32", [3]), "e": ("U8", [0])}, {"format": "pt"})


def test_a_faultless_header_is_recognised() -> None:
    assert safetensors._recognised(GOOD, "/m/x", 28) == safetensors._taken_apart(GOOD, "/m/x", 28)
    assert safetensors._recognised(canonical({"a": ("F32", [1])}) + b"   ", "/m/x", 4) is not None


@pytest.mark.parametrize(
    "header",
    [
        GOOD.replace(b'"e"', b'"a"'),
        GOOD.replace(b'"e":{', b'"e":{"d\\u0074ype":"U8",'),
        GOOD.replace(b'"e":{"dtype":"U8"', b'"a":{"d\\u0074ype":"U8"'),
        GOOD.replace(b'{"format":"pt"}', b'{"format":"},\\"a\\":{\\"dtype\\":"}'),
        GOOD.replace(b'"e"', b'"__metadata__"'),
        GOOD.replace(b'{"format":"pt"}', b'{"x":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"y":3}'),
        GOOD.replace(b'"__metadata__"', b'"a":3,"__metadata__"'),
        GOOD.replace(b'},"b.weight"', b'}},"b.weight"'),
        GOOD.replace(b"[0,16]", b"[00,16]"),
        GOOD.replace(b"[0,16]", b"[0]").replace(b"[16,28]", b"[16,16,28]"),
        GOOD.replace(b"[0,16]", b"[0,1.6e1]"),
        GOOD.replace(b"[0,16]", b"[ 0,16]"),
        GOOD.replace(b'"e"', b'"e\n"'),
        GOOD.replace(b'"BF16"', b'"bf16"'),
        GOOD.replace(b"[2,4]", b"[2, 4]"),
        GOOD.replace(b"[2,4]", b"[4,4]"),
        GOOD.replace(b'"e"', b'"e\\u0041"'),
        GOOD[:-1],
        GOOD + b"\n",
        b" " + GOOD,
        (b'{"__metadata__":{},'.decode() + "x").encode("utf-16-be")[:-2] + GOOD[GOOD.index(b'"a"') :],
    ],
)
def test_a_header_that_is_nearly_so(header: bytes) -> None:
    both(header, 8 + len(header) + 28)


@settings(max_examples=80, deadline=None)
@given(changes_of(GOOD))
@example(GOOD)
def test_any_change_to_a_header(header: bytes) -> None:
    both(header, 8 + len(header) + 28)


def test_a_header_says_the_same_where_there_is_no_msgspec(monkeypatch: pytest.MonkeyPatch) -> None:
    want = parse_header(GOOD, "/m/x", 8 + len(GOOD) + 28, 0)
    monkeypatch.setattr(safetensors, "_decoder", lambda: None)
    assert parse_header(GOOD, "/m/x", 8 + len(GOOD) + 28, 0) == want


def test_a_header_with_blanks_says_the_same() -> None:
    tensors = {"a": ("BF16", (2, 4)), "b": ("F32", (3,))}
    compact, loose = (json.dumps(header_of(tensors), separators=separators).encode() for separators in ((",", ":"), (", ", ": ")))
    found = [parse_header(raw, "/m/x", 8 + len(raw) + 28, 0)[1] for raw in (compact, loose)]

    assert safetensors._recognised(loose, "/m/x", 28) is not None
    assert [(file.names, file.kinds) for file in found[:1]] == [(file.names, file.kinds) for file in found[1:]]


# The index

PLAIN = '{\n  "metadata": {\n    "total_size": 3\n  },\n  "weight_map": {\n    "b": "y.safetensors",\n    "a.w": "x.safetensors"\n  }\n}\n'


def index_both(raw: bytes) -> None:
    recognised = index._recognised(raw)
    try:
        want = index._parsed(raw, "/m/index")
    except CheckpointError:
        assert recognised is None
    else:
        assert recognised in (None, want)


def test_a_plain_index_is_recognised() -> None:
    want = {"y.safetensors": b"b", "x.safetensors": b"a.w"}

    assert index._recognised(PLAIN.encode()) == index._parsed(PLAIN.encode(), "/m/index") == want
    assert index._recognised(b'{"weight_map":{"b":"y.safetensors","a.w":"x.safetensors"}}') == want


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"a.w"', '"b"'),
        ('"a.w"', '"a\\u002ew"'),
        ('"a.w"', '"é"'),
        ('"a.w"', '""'),
        ('"a.w"', '"a\tw"'),
        ('"a.w"', '"weight_map"'),
        ('"a.w"', '"a}"'),
        ('"x.safetensors"', '"../x.safetensors"'),
        ('"x.safetensors"', '"/etc/passwd"'),
        ('"x.safetensors"', '".."'),
        ('"x.safetensors"', "3"),
        ('"x.safetensors"\n', '"x.safetensors",\n'),
        ('"y.safetensors",', '"y.safetensors"'),
        ('"y.safetensors",', '"y.safetensors":'),
        ('"y.safetensors",', '"y.safetensors",,'),
        ('"y.safetensors",', '"y.safetensors"\v,'),
        ('"b":', '"b",'),
        ('"b":', 'x "b":'),
        ('"metadata": {', '"metadata": {"weight_map": {},'),
        ('"weight_map"', '"x\\"weight_map"'),
        ('"weight_map"', '"weight_map": {}, "weight_map"'),
        ("}\n}\n", '}, "weight_map": {}}'),
        ('  },\n  "weight_map"', '  "weight_map"'),
        ("}\n}\n", "}\n"),
        ("{\n  ", "[{\n  "),
    ],
)
def test_an_index_that_is_nearly_so(old: str, new: str) -> None:
    assert old in PLAIN
    index_both(PLAIN.replace(old, new).encode())


@settings(max_examples=80, deadline=None)
@given(changes_of(PLAIN.encode()))
def test_any_change_to_an_index(raw: bytes) -> None:
    index_both(raw)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_long_index_is_cut_in_pieces(monkeypatch: pytest.MonkeyPatch, ordered: bool) -> None:
    members = [(f"layer.{number:04d}.weight", f"{number % 7}.safetensors") for number in range(1000)]
    raw = json.dumps({"weight_map": dict(members if ordered else reversed(members))}, indent=2).encode()
    monkeypatch.setattr(index, "_CHUNK_BYTES", 100)

    assert index._recognised(raw) == index._parsed(raw, "/m/index")
    assert index._recognised(raw.replace(b"layer.0003.weight", b"layer.0004.weight")) is None


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
