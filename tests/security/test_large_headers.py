"""Headers and JSON of foreign checkpoints: their size and the number of their values are bounded before they are parsed."""

from __future__ import annotations

import json

import pytest

from sparkd.checkpoint import foreign_json
from sparkd.checkpoint.foreign_json import MAX_HEADER_VALUES, MAX_JSON_BYTES, MAX_VALUES, parsed
from sparkd.checkpoint.header import header_length
from sparkd.errors import CheckpointError

PATH = "/m/model.safetensors"


def test_a_header_is_at_most_so_large() -> None:
    with pytest.raises(CheckpointError, match=str(MAX_JSON_BYTES)):
        header_length((96_000_000).to_bytes(8, "little"), PATH, 1 << 40)


@pytest.mark.parametrize("value", [b"{}", b"[]", b"0", b'"x"'])
@pytest.mark.parametrize("most", [MAX_VALUES, MAX_HEADER_VALUES], ids=["index", "header"])
def test_json_of_too_many_values_is_refused_unparsed(value: bytes, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_json.json, "loads", pytest.fail)
    with pytest.raises(CheckpointError, match=str(most)):
        parsed(b"[" + value + (b"," + value) * most + b"]", PATH, "Choose another", most=most)


def test_the_largest_files_that_are_published_are_read() -> None:
    """An index of 300,000 tensors, and a header of 90,000."""
    index = {"weight_map": {f"model.layers.{at}.mlp.down_proj.weight_scale_inv": f"{at % 100}.safetensors" for at in range(300_000)}}
    header = {f"layers.{at}.weight": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [4 * at, 4 * at + 4]} for at in range(90_000)}
    for value, most in ((index, MAX_VALUES), (header, MAX_HEADER_VALUES)):
        assert parsed(json.dumps(value).encode(), PATH, "", most=most) == value


def test_brackets_that_never_close_are_refused() -> None:
    for raw in (b"[" * 100_000, b'{"a":{"dtype":"U8","shape":[' * 60_000 + b"}}"):
        with pytest.raises(CheckpointError):
            parsed(raw, PATH, "Choose another")
