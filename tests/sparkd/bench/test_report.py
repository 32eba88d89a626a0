from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from sparkd.bench import tables
from sparkd.bench.compare import compare
from sparkd.bench.report import html
from sparkd.bench.result import BenchResult, LoadRow
from tests.support.bench_example import example

FULL = example(depths=(0, 32768, 100000))
EVIL = "\"><script>alert(1)</script><b a='x'>&amp;"
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
        [FULL.model_copy(update={"cells": [], "loads": [], "quality": [], "samples": [], "published": []})],
        [],
    ],
    ids=["one", "three", "nothing", "none"],
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


def test_a_cell_beside_others_requests_is_drawn_as_one_that_throttled_is() -> None:
    beside = FULL.model_copy(update={"cells": [FULL.cells[0].model_copy(update={"others_tokens": 141}), *FULL.cells[1:]]})

    def hollow(result: BenchResult) -> int:
        picture = titled(html([result]), "Output tokens a second over concurrency")
        return sum("hollow" in (element.get("class") or "") for element in picture.iter())

    assert hollow(beside) == hollow(FULL) + 1
    assert "141 tokens" in html([beside]) and "141 tokens" in tables.markdown(beside)


def test_a_comparison_is_a_table_that_names_what_only_one_has() -> None:
    after = example("fp8", 0.8, depths=(0, 32768), failed=())
    text = html([FULL, after], compare(FULL, after))

    assert "<h2>Comparison</h2>" in text
    assert '<tr class="worse">' in text
    assert "pp2048 tg128 @ d100000 (c1): " in text
