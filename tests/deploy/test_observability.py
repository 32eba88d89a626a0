"""The rules of deploy/observability ask for nothing that is not exposed, and the documents name every alert."""

from __future__ import annotations

import re

from tests.support.observability import ALERTS, ROOT

PAGE = (ROOT / "docs" / "alerts.md").read_text()


def test_every_alert_has_a_section_and_every_section_an_alert() -> None:
    assert sorted(re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)) == sorted(rule["alert"] for rule in ALERTS)
    for rule in ALERTS:
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")
