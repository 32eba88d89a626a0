from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from sparkd.bench.compare import compare
from sparkd.bench.report import html
from sparkd.bench.result import BenchResult, Cell, LoadRow, Predicted
from tests.support.bench_example import STARTED_S, example, measured_cell

FULL = example(depths=(0, 32768, 100000))
EVIL = "\"><script>alert(1)</script><b a='x'>&amp;"
LOADS = "Loads by phase"
SVG = "{http://www.w3.org/2000/svg}"


class Page(HTMLParser):
    """Elements with their attributes, and that each is closed."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def pictures(text: str) -> list[ElementTree.Element]:
    """Each as an XML parser reads it: what a saved file is."""
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg .*?</svg>", text, re.DOTALL)]


def titled(text: str, title: str) -> ElementTree.Element:
    return next(picture for picture in pictures(text) if picture.findtext(f"{SVG}title") == title)


def markers(picture: ElementTree.Element) -> list[str]:
    """The text of each point that is drawn."""
    return [found.text or "" for path in picture.findall(f"{SVG}path") if (found := path.find(f"{SVG}title")) is not None]


def texts(picture: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


@pytest.mark.parametrize(
    "results",
    [
        [FULL],
        [example("bf16", 0.6, depths=(0, 4096)), example("fp8", 0.8, depths=(0, 4096)), example("nvfp4", depths=(0, 4096))],
        [FULL.model_copy(update={"cells": []})],
        [FULL.model_copy(update={"cells": [], "loads": [], "quality": [], "samples": [], "published": []})],
        [example(depths=(0,), concurrencies=(1,), failed=())],
        [example(depths=(0,), concurrencies=(1,), failed=((0, 1),))],
        [FULL] * 9,
        [],
    ],
    ids=["one", "three", "no cells", "nothing", "one cell", "one failed cell", "nine of one", "none"],
)
def test_the_page_is_whole_and_asks_for_nothing(results: list[BenchResult]) -> None:
    text = html(results)
    page = Page(text)

    assert page.open == []
    assert not {"link", "img", "iframe", "base", "object"} & {tag for tag, _ in page.elements}
    named = {name for _, attributes in page.elements for name in attributes}
    assert not {"src", "href", "style"} & named
    assert not [name for name in named if name.startswith("on")]
    identities = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len({*identities}) == len(identities)
    assert len(pictures(text)) == len(page.of("svg"))
    assert "NaN" not in text
    assert not re.search(r"\b(nan|inf)\b", re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL))


def test_each_plot_has_a_title_a_description_and_a_table() -> None:
    text = html([FULL, example("fp8", 0.8, depths=(0, 32768))])
    figures = re.findall(r"<figure .*?</figure>", text, re.DOTALL)

    assert len(figures) > 20
    for figure in figures:
        page = Page(figure)
        identities = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
        for picture in page.of("svg"):
            assert picture["role"] == "img"
            assert {*(picture["aria-labelledby"] or "").split()} <= identities
        assert [button["data-save"] for button in page.of("button")] == ["svg", "png"]
        assert figure.count("<tr>") > 1


def test_text_of_a_result_stays_text() -> None:
    changes: dict[str, Any] = {"model": EVIL, "gpu": EVIL, "vllm": EVIL, "format": EVIL, "nodes": [EVIL], "entry": {EVIL: EVIL}}
    cells = [each.model_copy(update={"state": "failed", "error": EVIL}) if index else each for index, each in enumerate(FULL.cells)]
    evil = FULL.model_copy(
        update={
            "subject": FULL.subject.model_copy(update=changes),
            "cells": cells,
            "profile": EVIL,
            "tool": EVIL,
            "state": "failed",
            "error": EVIL,
            "published": [each.model_copy(update={"what": EVIL, "source": EVIL, "unit": EVIL}) for each in FULL.published],
            "quality": [each.model_copy(update={"format": EVIL}) for each in FULL.quality],
            "loads": [LoadRow(way="first", seconds=3, phases=[{"phase": EVIL, "seconds": 1}])],  # type: ignore[list-item]
        }
    )
    text = html([evil, FULL], compare(evil, FULL))
    page = Page(text)

    assert len(page.of("script")) == 1
    assert not page.of("b")
    assert len(pictures(text)) == len(page.of("svg"))


def test_the_policy_allows_the_style_and_the_script_of_the_page_alone() -> None:
    text = html([FULL])
    policy = next(each["content"] or "" for each in Page(text).of("meta") if each.get("http-equiv"))

    assert policy.startswith("default-src 'none'")
    for tag in ("style", "script"):
        found = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert found is not None
        assert base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode() in policy


def test_a_failed_cell_is_named_and_never_drawn() -> None:
    picture = titled(html([FULL]), "Output tokens a second over concurrency")

    assert len(markers(picture)) == 3 * 4 - 1
    assert not [note for note in markers(picture) if "d100000 (c10)" in note]
    assert [line for line in texts(picture) if "d100000 (c10)" in line]


def test_a_line_is_broken_where_a_cell_failed() -> None:
    result = example(depths=(0,), failed=((0, 2),))
    picture = titled(html([result]), "Output tokens a second over concurrency")
    curves = [line.get("points", "") for line in picture.findall(f"{SVG}polyline") if "curve" in (line.get("class") or "")]

    assert [len(points.split()) for points in curves] == [2]  # from 5 to 10: 1 stands alone


def test_a_cell_that_throttled_is_hollow() -> None:
    picture = titled(html([FULL]), "Output tokens a second over concurrency")
    hollow = [path.findtext(f"{SVG}title") or "" for path in picture.findall(f"{SVG}path") if "hollow" in (path.get("class") or "")]

    assert len(hollow) == 1
    assert "d32768 (c10)" in hollow[0]


def test_error_bars_are_as_long_as_the_deviation() -> None:
    """In pixels of the axis, which has a tick at 0 and at 300."""
    picture = titled(html([FULL]), "Output tokens a second over concurrency")
    grid = [line.get("points", "").split() for line in picture.findall(f"{SVG}polyline") if line.get("class") in ("grid", "axis")]
    levels = sorted({float(points[0].split(",")[1]) for points in grid if points[0].split(",")[1] == points[1].split(",")[1]})
    whiskers = [line.get("points", "").split() for line in picture.findall(f"{SVG}polyline") if "whisker" in (line.get("class") or "")]
    heights = [abs(float(a.split(",")[1]) - float(b.split(",")[1])) for a, b in whiskers if a.split(",")[0] == b.split(",")[0]]
    stds = [each.rows[-1]["tg_throughput"]["std"] for each in FULL.cells if each.rows for _ in range(2)]

    pixels_a_token = (levels[-1] - levels[0]) / 300
    # Half a tenth of a pixel is lost at each end.
    assert sorted(heights) == pytest.approx(sorted(std * pixels_a_token for std in stds), abs=0.11)


def test_plots_beside_each_other_have_one_scale() -> None:
    text = html([example("bf16", 0.3, depths=(0, 4096)), example("nvfp4", 1.0, depths=(0, 4096))])
    ticks = [
        [line for line in texts(picture) if re.fullmatch(r"[0-9,]+", line)]
        for picture in pictures(text)
        if picture.findtext(f"{SVG}title") == "Output tokens a second over concurrency"
    ]

    assert len(ticks) >= 3
    assert ticks[-1] == ticks[-2]


def test_what_all_measured_is_drawn_in_one_plot() -> None:
    text = html([example("bf16", 0.6, depths=(0, 4096)), example("nvfp4", depths=(0, 4096))])
    picture = next(each for each in pictures(text) if {"bf16", "nvfp4"} <= {*texts(each)})

    assert len(markers(picture)) == 2 * 4


def test_cells_of_different_prompts_are_bars() -> None:
    cells = [
        measured_cell(Cell(depth=0, concurrency=1, prompt_tokens=prompt, output_tokens=output), STARTED_S, 1, seed)
        for seed, (prompt, output) in enumerate(((128, 128), (2048, 128), (8192, 16)))
    ]
    text = html([FULL.model_copy(update={"cells": cells})])
    picture = titled(text, "Output tokens a second by cell")

    assert [line for line in texts(picture) if line.startswith("pp")] == [each.cell.name for each in cells]
    assert len([box for box in picture.findall(f"{SVG}rect") if "bar" in (box.get("class") or "")]) == 3


def test_the_timeline_has_a_band_for_each_cell_and_a_gap_where_no_node_answered() -> None:
    picture = titled(html([FULL]), "Power, memory and temperature over time")
    bands = [box.findtext(f"{SVG}title") or "" for box in picture.findall(f"{SVG}rect") if "band" in (box.get("class") or "")]
    traces = [line for line in picture.findall(f"{SVG}polyline") if "k0" in (line.get("class") or "")]

    assert len(bands) == len(FULL.cells)
    assert [band for band in bands if band.endswith("failed")] == ["pp2048 tg128 @ d100000 (c10), failed"]
    assert len(traces) == 2


def test_the_phases_of_a_load_add_up_to_its_seconds() -> None:
    picture = titled(html([FULL]), LOADS)
    parts = [box.findtext(f"{SVG}title") or "" for box in picture.findall(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    first = parts[: len(FULL.loads[0].phases) + 1]

    assert first[-1].startswith("other: 0.8")
    assert sum(float(part.split(": ")[1].split()[0]) for part in first) == pytest.approx(FULL.loads[0].seconds, abs=0.05)


def test_a_mark_shows_when_the_plan_has_the_weights_ready() -> None:
    """From the beginning of the weights, in pixels of the axis, which has a tick at 0 and at 10."""
    said = Predicted(first_load_s=50.0, next_load_s=10.0)
    picture = titled(html([FULL.model_copy(update={"predicted": said})]), LOADS)
    lines = picture.findall(f"{SVG}polyline")
    marks = {line.findtext(f"{SVG}title"): line for line in lines if line.find(f"{SVG}title") is not None}
    ticks = sorted({float(line.get("points", "").split(",")[0]) for line in lines if line.get("class") in ("grid", "axis")})
    labels = [float(text) for text in texts(picture) if re.fullmatch(r"[0-9]+", text)]
    pixels_a_second = (ticks[1] - ticks[0]) / (labels[1] - labels[0])
    ends = [[float(point.split(",")[0]) for point in mark.get("points", "").split()] for mark in marks.values()]
    unloaded_s = [sum(phase.seconds for phase in load.phases if phase.phase in ("unload", "start")) for load in FULL.loads]

    assert [title.split(": ")[1] for title in marks if title] == ["50.0 s", "10.0 s"]
    assert len([line for line in lines if line.find(f"{SVG}title") is not None]) == len(FULL.loads)
    assert (ends[0][1] - ends[0][0]) / pixels_a_second == pytest.approx(50.0, abs=0.2)
    assert (ends[0][0] - ticks[0]) / pixels_a_second == pytest.approx(unloaded_s[0], abs=0.2)
    assert not titled(html([FULL]), LOADS).findall(f"{SVG}polyline/{SVG}title")


def test_a_comparison_is_a_table_that_names_what_only_one_has() -> None:
    after = example("fp8", 0.8, depths=(0, 32768), failed=())
    text = html([FULL, after], compare(FULL, after))

    assert "<h2>Comparison</h2>" in text
    assert '<tr class="worse">' in text
    assert "pp2048 tg128 @ d100000 (c1): " in text
