"""The page in Chromium against real vLLM: a load with its progress, and a chat that streams."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.e2e.conftest import NAME
from tests.support.daemon_process import DaemonProcess
from tests.support.waiting import until
from tests.web.browser import CHROMIUM, Tab, chromium, context_of

pytestmark = [pytest.mark.rest, pytest.mark.skipif(CHROMIUM is None, reason="chromium is missing: run `make chromium`")]


def test_a_model_is_loaded_and_asked_from_the_page(served: DaemonProcess) -> None:
    with chromium() as browser:
        tab = Tab(context_of(browser), served.url)
        page = tab.page
        tab.open("models", NAME)
        page.get_by_role("button", name=f"Unload {NAME}").click()
        expect(page.locator(".page-head .word")).to_have_text("STOPPED")
        page.get_by_role("button", name=f"Load {NAME}").click()
        # What the page tells meanwhile, word for word.
        told: list[str] = []

        def ready() -> int:
            told.extend(page.locator(".figure[role=status], p.figure").all_inner_texts())
            return page.locator(".page-head .word", has_text="READY").count()

        until(ready, "READY")
        assert any(line.startswith("loading") for line in told), told
        page.get_by_role("link", name="Load", exact=True).click()
        expect(page.get_by_role("table", name="Phases of the start").locator("tbody tr").nth(1)).to_be_visible()
        page.get_by_role("link", name="Log", exact=True).click()
        expect(page.get_by_role("log")).to_contain_text("Application startup complete")

        tab.open("playground")
        page.get_by_label("Model", exact=True).select_option(NAME)
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Most tokens").fill("24")
        page.get_by_label("Message").fill("What is the capital of France?")
        page.get_by_role("button", name="Send", exact=True).click()
        answer = page.get_by_role("article", name="assistant")
        expect(answer).to_contain_text("Paris")
        expect(page.locator(".speed")).to_contain_text(re.compile(r"done.*tokens/s", re.DOTALL))
        tab.open("requests")
        expect(page.get_by_role("table", name="Finished requests").locator("tbody tr").first).to_contain_text("chat/completions")
        assert (tab.faults, tab.refused, tab.foreign) == ([], [], [])
