"""The page of metrics passes `promtool check metrics`: sparkd's own families without a complaint, vLLM's but for names that are vLLM's."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.parser import text_string_to_metric_families

from sparkd import metrics
from sparkd.gateway.scraper import labelled, merge
from tests.stub.metrics import page
from tests.support.observability import complaints_of


@pytest.fixture
def full() -> Iterator[bytes]:
    """sparkd's page with a series of every family, and two engines' behind it."""
    touched = []
    for each in vars(metrics).values():
        if isinstance(each, Counter | Gauge | Histogram) and each._labelnames:
            values = ['a "quoted" \\ value\n' for _ in each._labelnames]
            if values not in [list(labels) for labels in each._metrics]:
                each.labels(*values)
                touched.append((each, values))
    yield metrics.text(merge(labelled(page(model, {}).decode(), model, "n") for model in ("m", "o")))
    for each, values in touched:
        each.remove(*values)


def test_every_family_has_a_series_help_and_type_in_one_place(full: bytes) -> None:
    lines = full.decode().splitlines()
    helps, types = ([line.split()[2] for line in lines if line.startswith(f"# {head} ")] for head in ("HELP", "TYPE"))
    families = [*text_string_to_metric_families(full.decode())]

    assert helps == types
    assert len(helps) == len(set(helps)) == len(families)
    assert all(family.documentation and family.samples and family.type != "unknown" for family in families)
    ours = {family.name + ("_info" if family.type == "info" else "") for family in metrics.REGISTRY.collect()}
    assert ours <= {family.name for family in families}


def test_promtool_has_nothing_to_say_of_our_own_and_only_its_names_of_vllms(full: bytes) -> None:
    assert complaints_of(metrics.text()) == []
    assert complaints_of(full) == []


def test_a_complaint_is_noticed() -> None:
    registry = CollectorRegistry()
    Gauge("ours_total", "A gauge that is named like a counter.", registry=registry).set(math.inf)
    Info("vllm_x", "", registry=registry)

    found = complaints_of(metrics.generate_latest(registry))
    assert {line.split(" ", 1)[0] for line in found} == {"ours_total", "vllm_x_info"}
