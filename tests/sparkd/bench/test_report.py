"""The report is one file: the page's modules with what they import, and the figures. tests/web/test_report.py opens one."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

import pytest

from sparkd.bench.report import ENTRY, html
from sparkd.bench.result import BenchResult
from tests.support.bench_example import example

FULL = example(depths=(0, 32768, 100000))
EVIL = "\"></script><!--<script>alert(1)</script><b a='x'>&amp;"


def part(text: str, attribute: str) -> str:
    """The content of the script with this attribute."""
    found = re.search(rf"<script {attribute}.*?>(.*?)</script>", text, re.DOTALL)
    assert found is not None
    return found[1]


def figures(text: str) -> Any:
    return json.loads(part(text, 'type="application/json"'))


@pytest.mark.parametrize("results", [[], [FULL], [FULL, example("fp8")], [FULL] * 3], ids=["none", "one", "two", "three"])
def test_the_figures_are_those_of_the_results_and_two_are_compared(results: list[BenchResult]) -> None:
    inside = figures(html(results))
    assert [BenchResult.model_validate(bench["result"]) for bench in inside["benches"]] == results
    assert (inside["comparison"] is not None) == (len(results) == 2)


def test_tables_that_the_page_lacks_stand_below() -> None:
    (bench,) = figures(html([FULL]))["benches"]
    assert [table["title"].split(";")[0] for table in bench["tables"]] == ["Figures of each cell", "Published figures"]


def test_every_module_has_what_it_imports() -> None:
    modules = json.loads(part(html([FULL]), 'type="importmap"'))["imports"]
    texts = {name: base64.b64decode(address.partition(",")[2]).decode() for name, address in modules.items()}
    imported = {target for text in texts.values() for target in re.findall(r"""(?:\bfrom|\bimport)\s*["']([\w./-]+)["']""", text)}
    assert imported | {ENTRY} == texts.keys()
    assert "app/api.js" not in texts, "a report asks no daemon"


def test_text_of_a_result_stays_text() -> None:
    subject = FULL.subject.model_copy(update={"model": EVIL, "gpu": EVIL, "entry": {EVIL: EVIL}})
    evil = FULL.model_copy(update={"subject": subject, "error": EVIL, "profile": EVIL})
    text = html([evil])
    assert len(re.findall(r"<script\b", text)) == 3 and "<!--" not in text and "<b a=" not in text
    assert figures(text)["benches"][0]["result"]["subject"]["model"] == EVIL


def test_the_policy_allows_the_style_and_the_scripts_of_the_file_alone() -> None:
    text = html([FULL])
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', text)
    assert policy is not None and policy[1].startswith("default-src 'none'")
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None
    for content in (style[1], part(text, 'type="importmap"'), part(text, 'type="module"')):
        assert base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() in policy[1]
