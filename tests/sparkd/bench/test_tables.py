from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkd.bench import tables
from sparkd.bench.figures import answer_metric
from sparkd.bench.result import BenchResult, LoadRow, Phase, Predicted
from tests.support.bench_example import example

# Written by llama-benchy 0.4.0 with tabulate 0.10.0 from the same rows: its save_report, fed with the example's.
FIXTURES = Path(__file__).resolve().parents[2] / "fixtures/bench"
RESULTS = {
    "many": example(depths=(0, 4096), concurrencies=(1, 10), failed=()),
    "one": example(depths=(0, 4096), concurrencies=(1,), failed=()),
}


def written(name: str, ending: str) -> str:
    return (FIXTURES / f"llama-benchy-0.4.0-{name}.{ending}").read_bytes().decode()


@pytest.mark.parametrize("name", RESULTS)
def test_the_arena_table_is_what_llama_benchy_writes(name: str) -> None:
    assert tables.arena_table(RESULTS[name]) == written(name, "md")
    assert tables.markdown(RESULTS[name]).startswith(written(name, "md") + "\n\n")


@pytest.mark.parametrize("name", RESULTS)
def test_the_json_is_what_llama_benchy_writes(name: str) -> None:
    """But for the mode, which a result does not hold, and the date, which is this one's."""
    ours, theirs = tables.benchy_json(RESULTS[name]), json.loads(written(name, "json"))

    assert list(ours) == list(theirs)
    assert {key for key in ours if ours[key] != theirs[key]} == {"latency_mode", "timestamp"}
    assert ours["timestamp"].endswith("Z")


def test_a_failed_cell_is_named_and_has_no_row() -> None:
    result = example(depths=(0,), concurrencies=(1, 2), failed=((0, 2),))
    lines = tables.markdown(result).splitlines()

    assert not [line for line in lines if "tg128 (c2)" in line]
    assert [line for line in lines if "pp2048 tg128 @ d0 (c2)" in line and "killed" in line]
    assert "(c1)" in tables.arena_table(result)  # the profile had more than one request at once


def table_of(result: BenchResult, title: str) -> list[dict[str, str]]:
    return next([dict(zip(head, row, strict=True)) for row in rows] for name, head, rows in tables.tables(result) if name.startswith(title))


def test_a_prediction_stands_beside_the_one_cell_that_it_is_of() -> None:
    said = Predicted(decode_tokens_per_s=100.0, first_load_s=40.0, next_load_s=10.0)
    loads = [
        LoadRow(way="first", seconds=70.0, phases=[Phase(phase="engine", seconds=20), Phase(phase="quantize", seconds=50)]),
        LoadRow(way="cached", seconds=25.0),
    ]
    result = example(depths=(0, 32768)).model_copy(update={"predicted": said, "loads": loads})
    decode = answer_metric(result.cells[0], "tg_throughput")

    assert decode is not None
    # The cached load has no phases, so nothing is measured for its prediction.
    assert [(float(ours), error) for _, _, ours, error in tables.predictions(result)] == [
        (pytest.approx(decode.mean, rel=0.01), f"{decode.mean / 100 - 1:+.0%}"),
        (50, "+25%"),
    ]


def test_a_load_shows_the_seconds_of_its_weights() -> None:
    read = Phase(phase="read", seconds=20)
    loads = [
        LoadRow(way="first", seconds=70.0, phases=[Phase(phase="engine", seconds=9), read, Phase(phase="quantize", seconds=30)]),
        LoadRow(way="swap", seconds=25.0, phases=[read]),
        LoadRow(way="cached", seconds=25.0),
    ]
    rows = table_of(example().model_copy(update={"loads": loads}), "Loads")

    assert [row["weights s"] for row in rows] == ["50.0", "20.0", "-"]


def test_text_of_a_result_stays_in_its_cell() -> None:
    subject = RESULTS["one"].subject.model_copy(update={"source": "/x|y\n<b>", "model": "a|b\n<i>"})
    line = tables.arena_table(RESULTS["one"].model_copy(update={"subject": subject})).splitlines()[2]

    assert line.startswith("| a\\|b &lt;i> |")
