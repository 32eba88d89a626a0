"""The kept weights that a cold load removes first."""

from __future__ import annotations

from typing import Any

import pytest

from sparkd.bench.load_bench import quantized_of
from sparkd.config.quantize import canonical, parse


@pytest.mark.parametrize(
    ("quantize", "removed"),
    [
        ("nf4-g64", ["m-nf4-g64-0b"]),
        ({"format": "fp8", "layers": [{"match": "a", "format": "nf4"}]}, ["m-fp8-mixed-0a"]),
        ({"format": "best", "gib": 0.12}, ["m-fp8-mixed-0a", "m-nf4-g64-0b"]),
        ("auto", ["m-fp8-mixed-0a", "m-nf4-g64-0b"]),
    ],
)
def test_a_first_load_finds_no_quantized_weights_of_its_format(quantize: Any, removed: list[str]) -> None:
    """`best` is a mix or a single format, which the entry does not tell."""
    names = [("m", "m-fp8-mixed-0a"), ("m", "m-nf4-g64-0b"), ("other", "other-fp8-mixed-0c")]
    entries = [{"kind": "quantized", "id": key, "node": "a", "used_by": [user], "valid": True} for user, key in names]
    entries.append({"kind": "hub", "id": "m-nf4-g64-0b", "node": "a", "used_by": ["m"], "valid": True})
    assert [entry["id"] for entry in quantized_of("m", canonical(parse(quantize)), entries)] == removed
