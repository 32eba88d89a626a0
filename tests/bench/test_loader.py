"""The loader bench's comparison of what loads hold: digests of every kind of tensor, and the first name that differs."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from tests.bench import digest
from tests.bench.digest import difference, digests
from tests.bench.loader import Case, Row, comparisons


def model() -> torch.nn.Module:
    made = torch.nn.Module()
    made.weight = torch.nn.Parameter(torch.arange(24, dtype=torch.bfloat16).view(4, 6))
    made.register_buffer("scale", torch.ones((), dtype=torch.float32))
    made.codes = torch.nn.Parameter(torch.arange(24, dtype=torch.uint8).view(4, 6).t(), requires_grad=False)
    made.weight_shape = torch.nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    made.register_buffer("nothing", torch.empty(0))
    made.tied = made.weight
    return made


def test_every_parameter_and_buffer_by_its_bytes() -> None:
    found = digests(model())
    expected = torch.arange(24, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    turned = torch.arange(24, dtype=torch.uint8).view(4, 6).t().contiguous().numpy().tobytes()

    assert set(found) == {"weight", "tied", "scale", "codes", "nothing"}
    assert found["weight"] == found["tied"] == f"bfloat16 [4, 6] {hashlib.sha256(expected).hexdigest()}"
    assert found["codes"] == f"uint8 [6, 4] {hashlib.sha256(turned).hexdigest()}"
    assert found["nothing"] == f"float32 [0] {hashlib.sha256().hexdigest()}"


@pytest.mark.parametrize("chunk_bytes", [1, 5, 8, 48])
def test_in_however_many_chunks(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = digests(model())
    monkeypatch.setattr(digest, "CHUNK_BYTES", chunk_bytes)
    assert digests(model()) == whole


def test_the_first_that_differs_is_named() -> None:
    one = digests(model())
    other = model()
    with torch.no_grad():
        other.codes[3, 2] += 1
    assert difference(one, one) is None
    assert difference(one, digests(other)) == "codes has other values"
    assert difference(one, {**one, "scale": one["scale"].replace("float32", "float64")}) == "scale is float64 [] instead of float32 []"
    assert difference(one, {name: said for name, said in one.items() if name != "weight"}) == "weight is missing"
    assert difference(one, {**one, "more": "x"}) == "more is new"


def row(case: Case, *ranks: dict[str, str]) -> Row:
    loads: list[dict[str, Any]] = [{"rank": number, "digests": found} for number, found in enumerate(ranks)]
    return Row(case, loads[::-1])


def test_loads_of_a_format_are_compared_rank_by_rank() -> None:
    same, other = {"a": "x [1] 1", "b": "x [1] 2"}, {"a": "x [1] 1", "b": "x [1] 3"}
    rows = [
        row(Case(False, "bf16"), same),
        row(Case(True, "bf16"), same),
        row(Case(True, "int4", ranks=2), same, other),
        row(Case(True, "int4", ranks=2, cache="first"), same, other),
        row(Case(True, "int4", ranks=2, cache="second"), other, same),
        Row(Case(True, "int4"), [], failed="it ended"),
        Row(Case(True, "int4", shuffled=True), [{"rank": 0}]),
    ]
    assert list(comparisons(rows)) == [
        ("ours bf16 ordered, against stock bf16 ordered: all 2 parameters and buffers", True),
        ("ours int4 ordered tp2 cache-first, against ours int4 ordered tp2: all 4 parameters and buffers", True),
        ("ours int4 ordered tp2 cache-second, against ours int4 ordered tp2: rank 0: b has other values", False),
    ]
