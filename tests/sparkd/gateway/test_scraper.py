"""The engines' own metrics: merged into one exposition that Prometheus can read, and fetched so that no engine can delay or break it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sparkd import metrics
from sparkd.execution.boundary import Boundary
from sparkd.gateway import scraper as scrape
from sparkd.gateway.scraper import KEEP_S, Scraper, labelled, merge
from sparkd.gateway.upstream import Upstream
from tests.sparkd.gateway.fakes import RawEngine, until_gone
from tests.support.fakes import FakeClock


def page_of(model_name: str, running: int = 1) -> str:
    """What vLLM serves (vllm/v1/metrics/loggers.py), made by the library that vLLM uses, with another library's metrics around it."""
    registry = CollectorRegistry()
    names = ("model_name", "engine")
    Gauge("process_open_fds", "Not the engine's.", registry=registry).set(9)
    Gauge("vllm:num_requests_running", "Number of requests in model execution batches.", names, registry=registry).labels(
        model_name, "0"
    ).set(running)
    Counter("vllm:request_success", "Count of successfully processed requests.", (*names, "finished_reason"), registry=registry).labels(
        model_name, "0", "stop"
    ).inc(3)
    ttft = Histogram("vllm:time_to_first_token_seconds", "TTFT, in seconds.", names, buckets=(0.001, 0.5), registry=registry)
    ttft.labels(model_name, "0").observe(0.2)
    tokens = Histogram("vllm:iteration_tokens_total", "Tokens per engine step.", names, buckets=(1, 8), registry=registry)
    tokens.labels(model_name, "0").observe(5)
    Gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", ("block_size", "node", "engine"), registry=registry).labels(
        "16", "x", "0"
    ).set(1)
    Gauge("http_requests_inprogress", "Not the engine's either.", registry=registry).set(1)
    return generate_latest(registry).decode()


def test_two_engines_become_one_exposition_that_parses() -> None:
    merged = merge([labelled(page_of("small"), "small", "n1"), labelled(page_of("large", 7), "large", "n2")]).decode()

    families = {family.name: family for family in text_string_to_metric_families(merged)}
    assert families.keys() == {
        "vllm:num_requests_running",
        "vllm:request_success",
        "vllm:time_to_first_token_seconds",
        "vllm:iteration_tokens_total",
        "vllm:cache_config_info",
    } | {family for family in families if family.endswith("_created")}
    assert [family.type for family in families.values() if not family.name.endswith("_created")] == [
        *("gauge", "counter", "histogram", "histogram", "gauge")
    ]
    requests = families["vllm:num_requests_running"].samples
    assert {(s.labels["model"], s.labels["node"], s.labels["model_name"]): s.value for s in requests} == {
        ("small", "n1", "small"): 1.0,
        ("large", "n2", "large"): 7.0,
    }
    ttft = families["vllm:time_to_first_token_seconds"].samples
    assert [s.name.rpartition("_")[2] for s in ttft] == ["bucket", "bucket", "bucket", "count", "sum"] * 2
    assert [s.value for s in ttft if s.labels.get("le") == "+Inf"] == [1.0, 1.0]


def test_help_and_type_stand_once_before_their_family_whose_samples_stand_together() -> None:
    lines = merge(labelled(page_of(name), name, "n") for name in "abc").decode().splitlines()

    heads = [line.split()[1:3] for line in lines if line.startswith("#")]
    assert len(heads) == len({tuple(head) for head in heads})
    runs: list[str] = []
    for line in lines:
        name = line.split()[2] if line.startswith("#") else line.partition("{")[0]
        family = next((f for f in ("vllm:time_to_first_token_seconds", "vllm:iteration_tokens_total") if name.startswith(f + "_")), name)
        if not runs or runs[-1] != family:
            runs.append(family)
    assert len(runs) == len(set(runs))


@pytest.mark.parametrize(
    ("line", "merged"),
    [
        ("vllm:up 1", 'vllm:up{model="m",node="n"} 1.0'),
        ("vllm:up{} 1", 'vllm:up{model="m",node="n"} 1.0'),
        ('vllm:up{a="1",} 1e+06', 'vllm:up{a="1",model="m",node="n"} 1e+06'),
        ('vllm:up{a="}{,\\" \\\\"} NaN', 'vllm:up{a="}{,\\" \\\\",model="m",node="n"} NaN'),
        ("process_cpu_seconds_total 1", ""),
        ("sparkd_requests_total 1", ""),
        ("what is this", ""),
    ],
)
def test_one_line(line: str, merged: str) -> None:
    found = merge([labelled(line, "m", "n")]).decode().splitlines()
    assert [line for line in found if not line.startswith("#")] == ([merged] if merged else [])


def test_names_of_models_and_nodes_are_escaped() -> None:
    merged = merge([labelled("vllm:up 1", 'a"b\\c\nd', "[::1]")]).decode()

    ((family,),) = ([*text_string_to_metric_families(merged)],)
    assert family.samples[0].labels == {"model": 'a"b\\c\nd', "node": "[::1]"}


def test_a_family_whose_name_begins_anothers_keeps_its_own_samples() -> None:
    page = "# TYPE vllm:num gauge\nvllm:num 1\nvllm:num_requests 2\n# TYPE vllm:size histogram\nvllm:size_sum 3\nvllm:num_left 4\n"

    families = {family.name: family.type for family in text_string_to_metric_families(merge([labelled(page, "m", "n")]).decode())}
    assert families == {"vllm:num": "gauge", "vllm:num_requests": "unknown", "vllm:size": "histogram", "vllm:num_left": "unknown"}


# Fetching.


@asynccontextmanager
async def engines(*names: str) -> AsyncIterator[tuple[dict[str, RawEngine], list[tuple[str, str, Upstream]]]]:
    with TemporaryDirectory(prefix="sparkd-") as folder:  # pytest's own paths are too long for a socket
        made = {name: RawEngine(Path(folder) / name) for name in names}
        for engine in made.values():
            await engine.start()
        targets = [(name, "n", Upstream(socket_path=str(engine.path), api_key="k" * 32)) for name, engine in made.items()]
        try:
            yield made, targets
        finally:
            for _, _, upstream in targets:
                upstream.close()
            for engine in made.values():
                await engine.stop()


def http(body: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: text/plain\r\ncontent-length: {len(body.encode())}\r\n\r\n{body}".encode()


def running(text: bytes) -> dict[str, float]:
    return {sample.labels["model"]: sample.value for family in text_string_to_metric_families(text.decode()) for sample in family.samples}


async def test_pages_come_from_every_engine_with_its_key() -> None:
    async with engines("a", "b") as (made, targets):
        made["a"].replies(http("vllm:num_requests_running 1"))
        made["b"].replies(http("vllm:num_requests_running 2"))
        scraper = Scraper(lambda: targets, FakeClock())
        assert scraper.text() == b""
        await scraper.once()

        assert running(scraper.text()) == {"a": 1.0, "b": 2.0}
        assert made["a"].heard[0].head.startswith(b"GET /metrics HTTP/1.1")
        assert made["a"].heard[0].headers["authorization"] == f"Bearer {'k' * 32}"


async def test_an_error_over_one_page_costs_no_other(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(page: str, model: str, node: str) -> Sequence[Metric]:
        if model == "a":
            raise RuntimeError(page)
        return labelled(page, model, node)

    monkeypatch.setattr(scrape, "labelled", broken)
    boundary = Boundary(FakeClock())
    async with engines("a", "b") as (made, targets):
        made["a"].replies(http("vllm:num_requests_running 1"))
        made["b"].replies(http("vllm:num_requests_running 2"))
        scraper = Scraper(lambda: targets, FakeClock(), boundary)
        await scraper.once()

        assert running(scraper.text()) == {"b": 2.0}
        assert "scraper of a (RuntimeError)" in str(boundary.condition)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    caplog.clear()


def ages(scraper: Scraper) -> dict[str, float]:
    """By model, seconds since its engine's page came, as a scrape shows it."""
    scraper.text()
    (family,) = metrics.ENGINE_METRICS_AGE_SECONDS.collect()
    return {sample.labels["model"]: sample.value for sample in family.samples}


async def test_a_hanging_engine_delays_nobody_and_its_last_page_grows_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "TIMEOUT_S", 0.5)
    clock = FakeClock()
    async with engines("a", "b") as (made, targets):
        made["a"].replies(http("vllm:num_requests_running 1"))
        made["b"].replies(http("vllm:num_requests_running 2"))
        scraper = Scraper(lambda: targets, clock)
        await scraper.once()
        before = scraper.text()

        made["a"].script = until_gone
        made["b"].replies(http("vllm:num_requests_running 3"))
        clock.now_s += KEEP_S
        fetching = asyncio.create_task(scraper.once())
        await asyncio.sleep(0)
        assert scraper.text() == before
        await fetching
        assert running(scraper.text()) == {"a": 1.0, "b": 3.0}

        clock.now_s += 1
        await scraper.once()
        assert running(scraper.text()) == {"b": 3.0}
        assert ages(scraper) == {"a": KEEP_S + 1, "b": 0.0}

        clock.now_s += 2
        assert ages(scraper) == {"a": KEEP_S + 3, "b": 2.0}
        there = list(targets)
        targets.clear()
        await scraper.once()
        assert ages(scraper) == {}
        targets.extend(there)


async def test_what_is_no_page_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "TIMEOUT_S", 0.5)
    async with engines("good", "error", "broken", "cut", "gone", "trickle") as (made, targets):
        made["good"].replies(http("vllm:x 1"))
        made["error"].replies(http("vllm:x 2", "500 Internal Server Error"))
        made["broken"].replies(b"not http at all\r\n\r\n")
        made["cut"].replies(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nvllm:x 4", then_close=True)
        await made["gone"].stop()
        made["trickle"].replies(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nvllm:x 5")
        scraper = Scraper(lambda: targets, FakeClock())
        await scraper.once()

        assert running(scraper.text()) == {"good": 1.0}


async def test_an_engine_that_is_gone_takes_its_page_along() -> None:
    async with engines("a", "b") as (made, targets):
        for engine in made.values():
            engine.replies(http("vllm:x 1"))
        scraper = Scraper(lambda: targets, FakeClock())
        await scraper.once()
        _, _, leaving = targets.pop()
        leaving.close()
        await scraper.once()

        assert running(scraper.text()) == {"a": 1.0}


async def test_run_goes_on_until_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "EVERY_S", 0.0)
    rounds = asyncio.Semaphore(0)

    def targets() -> list[tuple[str, str, Upstream]]:
        rounds.release()
        return []

    task = asyncio.create_task(Scraper(targets, FakeClock()).run())
    for _ in range(3):
        await rounds.acquire()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_behind_our_own_metrics_the_whole_still_parses() -> None:
    whole = metrics.text(merge([labelled(page_of("m"), "m", "n")])).decode()

    names = [family.name for family in text_string_to_metric_families(whole)]
    assert {"sparkd_requests", "vllm:num_requests_running"} <= set(names)
    assert len(names) == len(set(names))


async def test_the_rates_of_the_engines_that_answer() -> None:
    async with engines("m") as (made, targets):
        made["m"].replies(http(page_of("m", 2)))
        scraper = Scraper(lambda: targets, FakeClock())
        await scraper.once()
        assert scraper.rates()["m"].running == 2
        text = scraper.text()
        made["m"].replies(http(page_of("m", 3)))
        await scraper.once(whole=False)
        assert (scraper.rates()["m"].running, scraper.text()) == (3, text)
        made["m"].replies(http("", "500 Internal Server Error"))
        await scraper.once(whole=False)
        assert scraper.rates() == {}
