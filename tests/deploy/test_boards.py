"""The boards of deploy/observability are what their script writes, and no panel and no rule asks for a metric that is not exposed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sparkd import metrics
from sparkd.engine.metrics import merge
from tests.support.observability import ALERTS, FOLDER, RECORDED, metrics_of
from workers.stub.metrics import page


def script() -> ModuleType:
    spec = spec_from_file_location("boards", FOLDER / "boards.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BOARDS = script()
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}


def exposed() -> set[str]:
    """Our own families, vLLM's as the stub has them (tests/workers/stub/test_metrics.py holds them against vLLM), and Prometheus' `up`."""
    names = {"up"}
    for family in metrics.REGISTRY.collect():
        names |= {family.name + suffix for suffix in SUFFIXES.get(family.type, ("",))}
    text = merge({("m", "n"): page("m", {}).decode()})
    return names | {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def queries() -> Iterator[tuple[str, str]]:
    for name in BOARDS.BOARDS:
        for panel in BOARDS.board(name)["panels"]:
            for target in panel.get("targets", ()):
                yield f"{name}: {panel['title']}", target["expr"]
    yield from RECORDED.items()
    for rule in ALERTS:
        yield rule["alert"], rule["expr"]


def test_no_panel_and_no_rule_asks_for_what_is_not_exposed() -> None:
    known = exposed() | set(RECORDED)
    unknown = {where: missing for where, query in queries() if (missing := metrics_of(query) - known)}

    assert unknown == {}
    assert all(metrics_of(query) for _, query in queries())


def test_a_metric_that_is_not_exposed_is_noticed() -> None:
    assert metrics_of('sum(rate(http_requests_total{status="5xx"}[5m]))') - exposed() == {"http_requests_total"}


@pytest.mark.parametrize("name", BOARDS.BOARDS)
def test_a_board_is_what_the_script_writes(name: str) -> None:
    text = (FOLDER / "boards" / f"{name}.json").read_text(encoding="utf-8")

    assert text == BOARDS.text_of(name), "run python deploy/observability/boards.py"
    panels = json.loads(text)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= BOARDS.COLUMNS for panel in panels)


def test_every_board_has_an_id_of_its_own() -> None:
    assert len({BOARDS.board(name)["uid"] for name in BOARDS.BOARDS}) == len(BOARDS.BOARDS) == len([*(FOLDER / "boards").glob("*.json")])
