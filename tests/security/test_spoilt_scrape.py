"""An engine whose metrics would spoil the whole scrape: its page alone is left out, and counted."""

from __future__ import annotations

import pytest

from sparkd import metrics
from sparkd.engine.metrics import MAX_BYTES, Scraper, fault_of
from tests.sparkd.engine.test_metrics import engines, http, page_of, running
from tests.support.fakes import FakeClock

FAULTS = {
    "control": ['vllm:x{a="\x00"} 1'],
    "line": ["vllm:x one", 'vllm:x{a="1} 1', 'vllm:x 1 # {trace="x"} 2'],
    "label": ['vllm:x{a="1",a="2"} 1', 'vllm:x{exported_model="1",model="2"} 1'],
    "number": ["vllm:x 1e999", "vllm:x 1 " + "9" * 5000],
    "series": ['vllm:x{a="1"} 1\nvllm:x{a="1"} 1'],
    "family": ['vllm:x 1\nvllm:y 1\nvllm:x{a="1"} 1', "# TYPE vllm:x gauge\n# TYPE vllm:x counter\nvllm:x 1"],
}


@pytest.mark.parametrize(("fault", "page"), [(fault, page) for fault, pages in FAULTS.items() for page in pages])
def test_what_is_wrong_with_a_page(fault: str, page: str) -> None:
    assert fault_of(page) == fault


@pytest.mark.parametrize("page", [page_of("m"), "", "vllm:x +Inf\nvllm:y NaN 1700000000000\n", "other{a=1} x\nvllm:x 1\n"])
def test_a_sound_page(page: str) -> None:
    assert fault_of(page) is None


async def test_one_bad_engine_costs_its_own_series_only() -> None:
    left_out = metrics.ENGINE_METRICS_LEFT_OUT
    async with engines("a", "b") as (made, targets):
        made["a"].replies(http("vllm:num_requests_running 1"))
        scraper = Scraper(lambda: targets, FakeClock())
        for fault, page in (("series", "vllm:x 1\nvllm:x 1"), ("size", "vllm:x 1\n" + "#" * MAX_BYTES)):
            before = left_out.labels("b", fault)._value.get()
            made["b"].replies(http(page))
            await scraper.once()
            assert running(scraper.text()) == {"a": 1.0}
            assert left_out.labels("b", fault)._value.get() == before + 1
