"""That the tensor lists of published models are theirs: they add up to the totals that others read from the real headers. And what the
table of published figures has to say of each.

`python -m tests.bench.footprint --published` counts all of them; here are those that take no time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.bench.footprint_published import rows
from tests.support.published_headers import checkpoint_of, count_of

TOTALS = yaml.safe_load((Path(__file__).parents[1] / "fixtures" / "totals.yaml").read_text())
QUICK = ("Qwen3.5", "gpt-oss", "Gemma", "DeepSeek-V2", "Mistral", "GLM", "Nemotron-3-Nano")


@pytest.mark.parametrize(
    "total", [one for one in TOTALS if one["model"].startswith(QUICK)], ids=lambda one: f"{one['model']} {one['what']}"
)
def test_the_tensors_of_a_published_model_add_up(total: dict[str, Any]) -> None:
    assert count_of(total) == total["value"]


def test_a_way_to_store_a_model_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="fp4 is no way"):
        checkpoint_of("llama-3.1-8b", "fp4")


def test_every_cache_of_the_seeds_table_stands_beside_ours() -> None:
    found = [row for row in rows("Qwen3.5-27B|gpt-oss-120b") if row.what == "KV cache of all that is left"]
    told = {row.case.rpartition(", ")[2]: (row.measured, "assumed: max_model_len" in row.note) for row in found}
    assert told == {
        "962,352 tokens": (11.74, False),
        "3,395,392 tokens": (41.41, True),
        "500,192 tokens": (7.33, True),
        "1,204,224 tokens": (17.67, True),
    }
    assert all(row.predicted > 0 and row.passed is None for row in found)


def test_what_a_figure_alone_gives_away_is_told_beside_it() -> None:
    (row,) = (row for row in rows("Qwen3.6-27B-FP8") if row.what == "KV cache of a given size")
    assert row.passed and row.note == "inferred: speculative mtp-3"
