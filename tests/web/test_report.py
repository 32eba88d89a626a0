"""A report in a browser, from a file and without a daemon."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sparkd.bench.report import html
from tests.support.bench_example import example

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext


def test_a_report_shows_its_figures_and_asks_for_nothing(context: BrowserContext, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    from tests.web.browser import Tab

    report = tmp_path / "report.html"
    report.write_text(html([example(depths=(0, 100000)), example("fp8", 0.8, depths=(0, 100000), failed=())]))
    tab = Tab(context, report.as_uri())
    page = tab.page
    page.goto(report.as_uri())

    expect(page.get_by_role("table", name="Cells")).to_have_count(2)
    expect(page.get_by_role("table", name="Cells").first).to_contain_text("killed by the memory guard")
    expect(page.get_by_role("table", name="Changes").get_by_text("worse").first).to_be_visible()
    expect(page.locator(".charts canvas")).to_have_count(8)
    expect(page.get_by_role("img", name="Load 1: start")).to_have_count(2)
    expect(page.get_by_role("table", name="Published figures").first).to_contain_text("forums.example.com")
    assert tab.serious() == [] and tab.too_wide() == []
    assert tab.faults == [] and {url for url in tab.foreign if url != report.as_uri()} == set()
    page.close()
