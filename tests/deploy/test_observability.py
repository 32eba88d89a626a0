"""The rules of deploy/observability ask for nothing that is not exposed, and the documents name every alert."""

from __future__ import annotations

import re

from tests.support.observability import ALERTS, ROOT, metrics_of

PAGE = (ROOT / "docs" / "alerts.md").read_text()


def test_every_alert_has_a_section_and_every_section_an_alert() -> None:
    assert sorted(re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)) == sorted(rule["alert"] for rule in ALERTS)
    for rule in ALERTS:
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_the_metrics_of_a_query() -> None:
    queries = {
        'sum by (model, le) (rate(vllm:x_bucket{model="sum",a=~"b|c"}[5m]))': {"vllm:x_bucket"},
        "a / on (model) group_left () (b > 0) and c offset 5m": {"a", "b", "c"},
        "histogram_quantile(0.95, a:b:c) < 1e9 or 0 * inf": {"a:b:c"},
        "a{$filter}[$__rate_interval]": {"a"},
        "count(a == 1) unless ignoring (limit) b": {"a", "b"},
    }
    assert {query: metrics_of(query) for query in queries} == queries
