"""Owns what the boards and rules of deploy/observability ask for, and what a page of metrics has to answer them with."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

from prometheus_client.parser import text_string_to_metric_families

from sparkd import metrics
from sparkd.gateway.scraper import labelled, merge
from tests.support.observability import ALERTS, FOLDER, RECORDED, metrics_of

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}


def _script() -> ModuleType:
    spec = spec_from_file_location("boards", FOLDER / "boards.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BOARDS = _script()


def exposed(page: str) -> set[str]:
    """The names of our own series, of an engine with this page, and Prometheus' `up`."""
    names = {"up"}
    for family in metrics.REGISTRY.collect():
        names |= {family.name + suffix for suffix in SUFFIXES.get(family.type, ("",))}
    text = merge([labelled(page, "m", "n")]).decode()
    return names | {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def queries() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of every panel and rule."""
    for name in BOARDS.BOARDS:
        for panel in BOARDS.board(name)["panels"]:
            for target in panel.get("targets", ()):
                yield f"{name}: {panel['title']}", target["expr"]
    yield from RECORDED.items()
    for rule in ALERTS:
        yield rule["alert"], rule["expr"]


def unanswered(page: str) -> dict[str, set[str]]:
    """By panel or rule, the metrics that it asks for and the page does not have."""
    known = exposed(page) | set(RECORDED)
    return {where: missing for where, query in queries() if (missing := metrics_of(query) - known)}
