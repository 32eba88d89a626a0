"""The boards of deploy/observability are what their script writes, and no panel and no rule asks for a metric that is not exposed."""

from __future__ import annotations

import json

from tests.stub.metrics import page
from tests.support.boards import BOARDS, exposed, queries, unanswered
from tests.support.observability import FOLDER, metrics_of


def test_no_panel_and_no_rule_asks_for_what_is_not_exposed() -> None:
    """Panels ask for the stub's families only; tests/stub/test_metrics.py asks the same of the installed vLLM's."""
    assert unanswered(page("m", {}).decode()) == {}
    assert all(metrics_of(query) for _, query in queries())


def test_a_metric_that_is_not_exposed_is_noticed() -> None:
    assert metrics_of('sum(rate(http_requests_total{status="5xx"}[5m]))') - exposed(page("m", {}).decode()) == {"http_requests_total"}


def test_a_board_is_what_the_script_writes() -> None:
    for name in BOARDS.BOARDS:
        text = (FOLDER / "boards" / f"{name}.json").read_text(encoding="utf-8")

        assert text == BOARDS.text_of(name), "run python deploy/observability/boards.py"
        panels = json.loads(text)["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels) > 0
        assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= BOARDS.COLUMNS for panel in panels)


def test_every_board_has_an_id_of_its_own() -> None:
    assert len({BOARDS.board(name)["uid"] for name in BOARDS.BOARDS}) == len(BOARDS.BOARDS) == len([*(FOLDER / "boards").glob("*.json")])
