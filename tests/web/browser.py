"""Debian's Chromium for the tests of the page: every host but this machine is cut off, and a tab keeps what it must not do."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Browser, BrowserContext, Page, Playwright, expect, sync_playwright

from tests.support.waiting import HUNG_S

CHROMIUM = shutil.which("chromium")
# A folder for a picture of every page, light and dark; none are made without it.
PICTURES = os.environ.get("PAGE_PICTURES")
WIDTH, HEIGHT, NARROW = 1280, 900, 360
KEY = "sparkd-key"
_ONLY_THIS_MACHINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
# Chromium writes one for each refused request; whether a refusal is right is the test's own question.
_REFUSED = "Failed to load resource"
_WATCH = "addEventListener('securitypolicyviolation', (event) => console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`))"
_SERIOUS = ("serious", "critical")
expect.set_options(timeout=HUNG_S * 1000)


@contextmanager
def chromium(*arguments: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = launched(playwright, *arguments)
        try:
            yield browser
        finally:
            browser.close()


def launched(playwright: Playwright, *arguments: str) -> Browser:
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    return playwright.chromium.launch(executable_path=CHROMIUM, args=[*sandbox, _ONLY_THIS_MACHINE, *arguments])


def context_of(browser: Browser) -> BrowserContext:
    context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light", locale="en-US", accept_downloads=True)
    context.set_default_timeout(HUNG_S * 1000)
    return context


class Tab:
    """One tab. faults: errors in the console, violations of the policy, uncaught exceptions; foreign: requests to any other origin."""

    def __init__(self, context: BrowserContext, url: str, key: str = "") -> None:
        self.page: Page = context.new_page()
        self.url = url
        self.faults: list[str] = []
        self.refused: list[str] = []
        self.foreign: list[str] = []
        self._axe = False
        self.page.add_init_script(_WATCH)
        if key:
            self.page.add_init_script(f"sessionStorage.setItem({json.dumps(KEY)}, {json.dumps(key)})")
        self.page.on("console", self._written)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", self._asked)

    def _written(self, message: Any) -> None:
        if message.type == "error":
            (self.refused if message.text.startswith(_REFUSED) else self.faults).append(f"{message.text} {message.location.get('url')}")

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((f"{self.url}/", "data:", "blob:")):
            self.foreign.append(request.url)

    def open(self, *address: str) -> None:
        """A page of this tab's document; the document itself at first."""
        self.page.goto(f"{self.url}/ui/#/{'/'.join(address)}")

    def serious(self, *rules: str) -> list[str]:
        """axe's serious and critical findings, of some rules or of all."""
        if not self._axe:
            self.page.evaluate(AXE_SCRIPT)
            self._axe = True
        options: dict[str, Any] = {"resultTypes": ["violations"]} | ({"runOnly": list(rules)} if rules else {})
        found = self.page.evaluate("(options) => axe.run(document, options)", options)
        return [
            f"{one['id']} ({one['impact']}): {node['target']} {node['html'][:200]} {node.get('failureSummary', '')}"
            for one in found["violations"]
            if one["impact"] in _SERIOUS
            for node in one["nodes"]
        ]

    def too_wide(self) -> Sequence[str]:
        """What reaches beyond the right edge, where the page as a whole can be scrolled sideways."""
        return self.page.evaluate(_TOO_WIDE)

    def picture(self, name: str) -> None:
        if PICTURES:
            folder = Path(PICTURES)
            folder.mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=folder / f"{name}.png", animations="disabled")


_TOO_WIDE = """() => {
  const root = document.documentElement;
  if (root.scrollWidth <= root.clientWidth) return [];
  const some = [...document.querySelectorAll("body *")].filter((one) => one.getBoundingClientRect().right > root.clientWidth + 1);
  return [`${root.scrollWidth} of ${root.clientWidth}`, ...some.slice(0, 5).map((one) => one.outerHTML.slice(0, 160))];
}"""
