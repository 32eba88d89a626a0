"""What a scrape shows of the supervisor's picture, and that what is gone is shown no longer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sparkd import __version__, metrics
from sparkd.config.memory import MemorySettings
from sparkd.control import gauges
from sparkd.state.model_state import ModelState
from sparkd.state.nouns import Progress, Reading
from sparkd.state.snapshot import ModelView, NodeView, Snapshot
from tests.sparkd.gateway.fakes import view
from workers.quantization.recipe import QuantizationRecipe

GIB = 1 << 30
READING = Reading(
    node_id="n1",
    at_s=100.0,
    mem_total_bytes=128 * GIB,
    mem_available_bytes=90 * GIB,
    mem_free_bytes=40 * GIB,
    cached_bytes=50 * GIB,
    swap_total_bytes=16 * GIB,
    swap_free_bytes=15 * GIB,
    psi_some_avg10=12.5,
    psi_full_avg10=0.0,
    age_s=0.25,
)
NODE = NodeView("n1", "10.0.0.1", True, True, READING, 121.0, 4.5)


def snapshot(*models: ModelView, nodes: tuple[NodeView, ...] = ()) -> Snapshot:
    return Snapshot(5.0, True, False, 0.0, {model.name: model for model in models}, nodes, {})


@pytest.fixture(autouse=True)
def _leave_nothing() -> Iterator[None]:
    """The registry is the process's own: what these tests show must not be there for the next ones."""
    gauges.show(snapshot())
    yield
    gauges.show(snapshot())


def shown(family: str, **labels: str) -> dict[str, float]:
    """Values of a family's samples that carry `labels`, by their other labels, joined."""
    found = {}
    for each in text_string_to_metric_families(metrics.text().decode()):
        for sample in each.samples if each.name == family else ():
            if labels.items() <= sample.labels.items():
                rest = [value for name, value in sample.labels.items() if name not in labels]
                found[" ".join([sample.name.removeprefix(family), *rest]).strip()] = sample.value
    return found


@pytest.mark.parametrize("state", ModelState)
def test_exactly_one_state_is_one(state: ModelState) -> None:
    gauges.show(snapshot(view("m", state=state)))

    assert shown("sparkd_model_state", model="m") == {each.value: float(each is state) for each in ModelState}


def test_queue_and_bytes_of_a_load() -> None:
    model = view("m", queued=3, progress=Progress(bytes_done=7, bytes_total=9))
    gauges.show(snapshot(model))
    assert [shown(f"sparkd_{name}", model="m") for name in ("queue_depth", "model_load_bytes", "model_load_total_bytes")] == [
        {"": 3.0},
        {"": 7.0},
        {"": 9.0},
    ]

    gauges.show(snapshot(replace(model, queued=0, progress=None)))
    assert shown("sparkd_queue_depth", model="m") == {"": 0.0}
    assert shown("sparkd_model_load_bytes", model="m") == {"": 7.0}, "of the last load, once it is over"


def test_what_the_loader_says() -> None:
    told = Progress("loading", bytes_done=7, bytes_total=9, units_done=2, units_total=3, bytes_per_s=4.5, read_bytes=4096, cache_bytes=5)
    gauges.show(snapshot(view("m", progress=told)))
    values = {"model_load_bytes_per_second": 4.5, "model_load_read_bytes": 4096, "model_load_units": 2, "model_load_total_units": 3}
    for name, value in (values | {"quantized_cache_bytes": 5}).items():
        assert shown(f"sparkd_{name}", model="m") == {"": value}, name

    for later in (replace(told, bytes_per_s=None), replace(told, phase="warming")):
        gauges.show(snapshot(view("m", progress=told)))
        gauges.show(snapshot(view("m", progress=later)))
        assert shown("sparkd_model_load_bytes_per_second", model="m") == {"": 0.0}


def test_how_the_kv_cache_was_sized_while_there_is_one() -> None:
    told = {"pool_bytes": 7 * GIB, "tokens": 100, "sequences": 2.5, "bytes_per_token": 512.5, "margin_bytes": GIB, "slack_bytes": -5}
    model = view("m", progress=Progress("serving", kv=told))
    gauges.show(snapshot(model))
    values = {"bytes": 7.0 * GIB, "tokens": 100, "sequences": 2.5, "bytes_per_token": 512.5, "margin_bytes": GIB, "slack_bytes": -5}
    for name, value in values.items():
        assert shown(f"sparkd_model_kv_cache_{name}", model="m") == {"": value}, name

    for later in (Progress("sizing", kv={"phase": "rehearsing", "pool_bytes": None}), Progress(), None):
        gauges.show(snapshot(model))
        gauges.show(snapshot(replace(model, progress=later)))
        for name in values:
            assert shown(f"sparkd_model_kv_cache_{name}", model="m") == {}, "an engine that is gone has none"


def test_failures_count_by_reason() -> None:
    gauges.show(snapshot(view("m")))
    gauges.failed("m", "EngineExited")
    gauges.failed("m", "EngineExited")
    gauges.failed("m", "DoesNotFit")

    assert shown("sparkd_model_failures", model="m") == {"_total EngineExited": 2.0, "_total DoesNotFit": 1.0}


def test_a_node_to_the_byte() -> None:
    gauges.show(snapshot(nodes=(NODE,)))

    values = {
        "mem_total_bytes": 128 * GIB,
        "mem_available_bytes": 90 * GIB,
        "mem_free_bytes": 40 * GIB,
        "mem_cached_bytes": 50 * GIB,
        "mem_swap_used_bytes": GIB,
        "psi_memory_some_ratio": 0.125,
        "psi_memory_full_ratio": 0.0,
        "reading_age_seconds": 0.25,
        "reserved_bytes": 4.5 * GIB,
    }
    for name, value in values.items():
        assert shown(f"sparkd_node_{name}", node="n1") == {"": float(value)}, name


def test_what_the_kernel_does_not_say_is_not_shown() -> None:
    gauges.show(snapshot(nodes=(replace(NODE, reading=replace(READING, psi_some_avg10=None)),)))
    assert shown("sparkd_node_psi_memory_some_ratio") == {}
    assert shown("sparkd_node_mem_cma_total_bytes") == {}

    gauges.show(snapshot(nodes=(replace(NODE, reading=replace(READING, cma_total_bytes=128 << 20, cma_free_bytes=0)),)))
    assert shown("sparkd_node_mem_cma_total_bytes") == {"n1": float(128 << 20)}
    assert shown("sparkd_node_mem_cma_free_bytes") == {"n1": 0.0}


def without_the_process() -> list[bytes]:
    """The exposition without the process's own figures, which move by themselves."""
    return [line for line in metrics.text().splitlines() if not line.startswith(b"process_")]


def test_what_is_gone_leaves_no_series() -> None:
    gauges.show(snapshot())
    before = without_the_process()
    told = Progress(bytes_done=1, bytes_total=1, units_done=1, units_total=1, read_bytes=1, cache_bytes=1, kv={"tokens": 1})
    gauges.show(snapshot(view("m", progress=told), view("other"), nodes=(NODE,)))
    metrics.MODEL_LOAD_SECONDS.labels("m").observe(1.0)
    gauges.failed("m", "EngineExited")
    metrics.MODEL_RESTARTS.labels("m").inc()
    gauges.show(snapshot(view("other"), nodes=(NODE,)))
    assert b'model="m"' not in metrics.text()
    assert shown("sparkd_model_state", model="other")["READY"] == 1.0

    gauges.show(snapshot())
    assert without_the_process() == before


def test_every_series_of_a_node_or_a_model_goes_with_it_whatever_its_other_labels() -> None:
    """Whatever metrics.py declares: a metric that is new there needs no line of its own in gauges.py to go."""
    of_requests = (
        metrics.REQUESTS,
        metrics.REQUEST_SECONDS,
        metrics.IN_FLIGHT,
        metrics.QUEUE_SECONDS,
        metrics.TIME_TO_FIRST_TOKEN_SECONDS,
    )
    declared = [each for each in vars(metrics).values() if {"node", "model"} & set(getattr(each, "_labelnames", ()))]
    declared = [each for each in declared if each not in of_requests]
    assert len(declared) > 45
    gauges.show(snapshot(view("gone"), nodes=(replace(NODE, node_id="gone"),)))
    for metric in declared:
        metric.labels(*("gone" if name in ("node", "model") else "other" for name in metric._labelnames))
    gauges.show(snapshot())

    assert b'"gone"' not in metrics.text()


def test_what_a_node_says_no_longer_is_shown_no_longer() -> None:
    drawing = replace(READING, gpu_power_w=41.0, gpu_busy_percent=96.0, gpu_celsius=60.0, floor_in_s=3.0, guarded=False)
    gauges.show(snapshot(nodes=(replace(NODE, reading=drawing),)))
    families = (
        "sparkd_gpu_power_draw_watts",
        "sparkd_gpu_utilization_ratio",
        "sparkd_gpu_temperature_celsius",
        "sparkd_node_mem_floor_seconds",
        "sparkd_node_guarded",
    )
    assert [shown(family, node="n1") for family in families] == [{"": 41.0}, {"": 0.96}, {"": 60.0}, {"": 3.0}, {"": 0.0}]

    gauges.show(snapshot(nodes=(NODE,)))
    assert [shown(family, node="n1") for family in families] == [{}] * 5


def test_of_a_node_that_does_not_answer_only_the_age_of_its_last_reading_is_left_and_grows() -> None:
    seen = snapshot(nodes=(replace(NODE, reading=replace(READING, gpu_power_w=41.0)),))
    gauges.show(seen, MemorySettings().limits)
    gauges.show(replace(seen, at_s=seen.at_s + 20, nodes=(replace(NODE, agent=False, reading=None),)))

    assert shown("sparkd_node_reading_age_seconds", node="n1") == {"": 20.25}
    assert shown("sparkd_node_reserved_bytes", node="n1") == {"": 4.5 * GIB}
    for family in ("sparkd_node_mem_available_bytes", "sparkd_node_memory_level", "sparkd_gpu_power_draw_watts"):
        assert shown(family) == {}, family

    gauges.show(snapshot())
    gauges.show(snapshot(nodes=(replace(NODE, reading=None),)))
    assert shown("sparkd_node_reading_age_seconds") == {}, "a node that was never read has no age"


def test_the_guards_limits_are_those_that_are_configured() -> None:
    gauges.show(snapshot(nodes=(NODE,)), MemorySettings(soft_gib=9).limits)
    assert shown("sparkd_node_mem_limit_bytes", node="n1") == {"soft": 9.0 * GIB, "hard": 4.0 * GIB, "floor": 2.0 * GIB}

    gauges.show(snapshot())
    assert shown("sparkd_node_mem_limit_bytes") == {}


def test_the_counters_that_alerts_look_at_begin_at_zero() -> None:
    gauges.show(snapshot(view("m")))
    assert shown("sparkd_guard_actions", model="m") == dict.fromkeys(("_total kill", "_total evict", "_total shed"), 0.0)
    for name in ("watchdog_stalls", "swaps", "model_restarts"):
        assert shown(f"sparkd_{name}", model="m") == {"_total": 0.0}, name

    gauges.failed("m", "MemoryGuard")
    gauges.show(snapshot(view("m")))
    assert shown("sparkd_guard_actions", model="m")["_total kill"] == 1.0


def test_what_a_model_is_stands_in_one_series_and_no_folder_in_it() -> None:
    gauges.show(snapshot(view("m", source="/srv/secret/qwen3", quantize=QuantizationRecipe.parse("nvfp4").canonical(), max_model_len=4096)))
    assert shown("sparkd_model_info", model="m") == {"4096 0 nvfp4 qwen3": 1.0}

    mix = QuantizationRecipe.parse({"layers": {"experts": "nvfp4"}}).canonical()
    gauges.show(snapshot(view("m", source="Qwen/Qwen3-8B", quantize=mix, max_model_len=None)))
    assert shown("sparkd_model_info", model="m") == {"0 mapping Qwen/Qwen3-8B": 1.0}

    gauges.show(snapshot())
    assert shown("sparkd_model_info", model="m") == {}
    gauges.show(snapshot(view("m", source="/srv/other", quantize="auto", max_model_len=8)))
    assert shown("sparkd_model_info", model="m") == {"8 0 auto other": 1.0}


def test_the_build_and_the_daemons_own_process() -> None:
    families = {each.name: each for each in text_string_to_metric_families(metrics.text().decode())}

    (build,) = families["sparkd_build_info"].samples if "sparkd_build_info" in families else families["sparkd_build"].samples
    assert (build.value, build.labels["version"]) == (1.0, __version__)
    assert families["process_resident_memory_bytes"].samples[0].value > 1 << 20
    assert families["process_open_fds"].samples[0].value > 0
