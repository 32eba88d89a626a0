"""Writes the Grafana boards of this folder: python deploy/observability/boards.py. A change of a panel is made here, never in the JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent / "boards"
SOURCE = {"type": "prometheus", "uid": "${source}"}
ENGINE = 'model=~"$model",node=~"$node"'
NODE = 'node=~"$node"'
MODEL = 'model=~"$model"'
COLUMNS, HEIGHT = 24, 8


class Panel(NamedTuple):
    """queries: (PromQL, legend) of each curve. unit: Grafana's name of it."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    stacked: bool = False
    kind: str = "timeseries"


class Row(NamedTuple):
    title: str
    panels: tuple[Panel, ...]


def rate(name: str, by: str = "model, node", labels: str = ENGINE) -> str:
    return f"sum by ({by}) (rate({name}{{{labels}}}[$__rate_interval]))"


def quantiles(title: str, histogram: str, unit: str = "s", labels: str = ENGINE, by: str = "model") -> Panel:
    """The median and the 95th percentile of a histogram."""
    buckets = rate(f"{histogram}_bucket", f"{by}, le", labels)
    return Panel(
        title, unit, tuple((f"histogram_quantile({share}, {buckets})", f"p{share * 100:.0f} {{{{{by}}}}}") for share in (0.5, 0.95))
    )


def value(title: str, unit: str, name: str, labels: str = NODE, legend: str = "{{node}}") -> Panel:
    return Panel(title, unit, ((f"{name}{{{labels}}}", legend),))


def flow(title: str, unit: str, *names: str, labels: str = ENGINE, by: str = "model, node") -> Panel:
    """Counters, by the second."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return Panel(
        title, unit, tuple((rate(name, by, labels), f"{legend} {name.partition(':')[2].removesuffix('_total')}") for name in names)
    )


def share(title: str, part: str, whole: str, by: str = "model, node") -> Panel:
    return Panel(title, "percentunit", ((f"{rate(part, by)} / ({rate(whole, by)} > 0)", "{{model}} {{node}}"),))


SPARKD = (
    Row(
        "Memory",
        (
            Panel(
                "Unified memory",
                "bytes",
                (
                    (f"sparkd_node_mem_available_bytes{{{NODE}}}", "{{node}} available"),
                    (f"sparkd_node_mem_cached_bytes{{{NODE}}}", "{{node}} page cache"),
                    (f"sparkd_node_reserved_bytes{{{NODE}}}", "{{node}} reserved"),
                    (f"sparkd_node_mem_unaccounted_bytes{{{NODE}}}", "{{node}} unaccounted"),
                    (f"sparkd_node_mem_limit_bytes{{{NODE}}}", "{{node}} {{limit}} limit"),
                ),
            ),
            Panel(
                "Memory of engines",
                "bytes",
                (
                    (f"sparkd_engine_host_bytes{{{ENGINE}}}", "{{node}} {{model}} host"),
                    (f"sparkd_engine_device_bytes{{{ENGINE}}}", "{{node}} {{model}} device"),
                ),
                stacked=True,
            ),
            value("Level of the guard (0 ok, 1 tight, 2 pressed, 3 critical)", "short", "sparkd_node_memory_level"),
            value("Time to the floor", "s", "sparkd_node_mem_floor_seconds"),
            value("Pressure: some task waits for memory", "percentunit", "sparkd_node_psi_memory_some_ratio"),
            Panel(
                "What the guard did, each 5 minutes",
                "short",
                ((f"sum by (model, action) (increase(sparkd_guard_actions_total{{{MODEL}}}[5m]))", "{{action}} {{model}}"),),
            ),
            value("Memory that has not come back", "bytes", "sparkd_release_leaked_bytes"),
            value("Age of the reading", "s", "sparkd_node_reading_age_seconds"),
        ),
    ),
    Row(
        "Power and cable",
        (
            value("Power", "watt", "sparkd_gpu_power_draw_watts"),
            value("GPU use", "percentunit", "sparkd_gpu_utilization_ratio"),
            value("Temperature", "celsius", "sparkd_gpu_temperature_celsius"),
            Panel(
                "Cable, as measured last",
                "Bps",
                (
                    ("sparkd_fabric_rate_bytes_per_second", "{{a}} - {{b}}"),
                    ("sparkd_fabric_normal_rate_bytes_per_second", "{{a}} - {{b}} normal"),
                ),
            ),
        ),
    ),
    Row(
        "Models",
        (
            Panel("State", "short", ((f"sparkd_model_state{{{MODEL}}} == 1", "{{model}} {{state}}"),), kind="table"),
            value("Load: bytes per second", "Bps", "sparkd_model_load_bytes_per_second", MODEL, "{{model}}"),
            quantiles("Time of a load", "sparkd_model_load_seconds", labels=MODEL),
            Panel(
                "Evictions, hangs and failures, each hour",
                "short",
                (
                    (f"sum by (model) (increase(sparkd_swaps_total{{{MODEL}}}[1h]))", "{{model}} evicted"),
                    (f"sum by (model) (increase(sparkd_watchdog_stalls_total{{{MODEL}}}[1h]))", "{{model}} hung"),
                    (f"sum by (model, reason) (increase(sparkd_model_failures_total{{{MODEL}}}[1h]))", "{{model}} {{reason}}"),
                ),
            ),
        ),
    ),
    Row(
        "Gateway",
        (
            Panel("Requests", "reqps", ((rate("sparkd_requests_total", "model, code", MODEL), "{{model}} {{code}}"),)),
            quantiles("Time of a request", "sparkd_request_seconds", labels=MODEL),
            quantiles("Time to the first token", "sparkd_time_to_first_token_seconds", labels=MODEL),
            quantiles("Wait for an engine", "sparkd_queue_seconds", labels=MODEL),
            value("Queue", "short", "sparkd_queue_depth", MODEL, "{{model}}"),
            value("In flight", "short", "sparkd_in_flight", MODEL, "{{model}}"),
            Panel("Clients", "short", (("sparkd_connections", "connected"), ("sparkd_connections_max", "most"))),
            Panel("Errors inside sparkd", "short", (("sum by (where) (increase(sparkd_internal_errors_total[1h]))", "{{where}}"),)),
        ),
    ),
)
OVERVIEW = (
    Row(
        "Latency",
        (
            quantiles("Time to the first token", "vllm:time_to_first_token_seconds"),
            quantiles("Between two tokens", "vllm:inter_token_latency_seconds"),
            quantiles("Time per output token", "vllm:request_time_per_output_token_seconds"),
            quantiles("Whole request", "vllm:e2e_request_latency_seconds"),
        ),
    ),
    Row(
        "Traffic",
        (
            flow("Tokens", "short", "vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
            flow("Requests by how they ended", "reqps", "vllm:request_success_total", by="model, finished_reason"),
            Panel("HTTP", "reqps", ((rate("sparkd_requests_total", "route, code", MODEL), "{{route}} {{code}}"),)),
            quantiles("HTTP time", "sparkd_request_seconds", labels=MODEL, by="route"),
        ),
    ),
    Row(
        "Load and shape",
        (
            value("Running", "short", "vllm:num_requests_running", ENGINE, "{{model}} {{node}}"),
            value("Queue", "short", "vllm:num_requests_waiting", ENGINE, "{{model}} {{node}}"),
            value("KV cache in use", "percentunit", "vllm:kv_cache_usage_perc", ENGINE, "{{model}} {{node}}"),
            share("Prompt tokens out of the cache", "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
            quantiles("Prompt length", "vllm:request_prompt_tokens", "short"),
            quantiles("Answer length", "vllm:request_generation_tokens", "short"),
        ),
    ),
)
INSTANCES = (
    Row(
        "By engine",
        (
            flow("Tokens generated", "short", "vllm:generation_tokens_total"),
            quantiles("Time to the first token by node", "vllm:time_to_first_token_seconds", by="node"),
            quantiles("Between two tokens by node", "vllm:inter_token_latency_seconds", by="node"),
            value("Running", "short", "vllm:num_requests_running", ENGINE, "{{model}} {{node}} {{engine}}"),
            value("Waiting, and why", "short", "vllm:num_requests_waiting_by_reason", ENGINE, "{{model}} {{node}} {{reason}}"),
            quantiles("Tokens per step", "vllm:iteration_tokens_total", "short"),
            quantiles("Wait in the engine", "vllm:request_queue_time_seconds"),
            quantiles("Prefill", "vllm:request_prefill_time_seconds"),
            quantiles("Decode", "vllm:request_decode_time_seconds"),
        ),
    ),
    Row(
        "Process and settings",
        (
            Panel("CPU of the daemon", "short", (("rate(process_cpu_seconds_total[$__rate_interval])", "cores"),)),
            Panel("Memory of the daemon", "bytes", (("process_resident_memory_bytes", "resident"),)),
            Panel("Open files of the daemon", "short", (("process_open_fds", "open"), ("process_max_fds", "most"))),
            value("Age of an engine's metrics", "s", "sparkd_engine_metrics_age_seconds", ENGINE, "{{model}} {{node}}"),
            value("Sleep", "short", "vllm:engine_sleep_state", ENGINE, "{{model}} {{sleep_state}}"),
            flow("Estimated FLOP/s per GPU", "flops", "vllm:estimated_flops_per_gpu_total"),
            Panel("Cache settings", "short", ((f"vllm:cache_config_info{{{ENGINE}}}", ""),), kind="table"),
        ),
    ),
)
CACHE = (
    Row(
        "KV cache",
        (
            value("In use", "percentunit", "vllm:kv_cache_usage_perc", ENGINE, "{{model}} {{node}}"),
            flow("Preemptions", "short", "vllm:num_preemptions_total"),
            value("Size", "bytes", "sparkd_model_kv_cache_bytes", MODEL, "{{model}}"),
            value("Requests of full length", "short", "sparkd_model_kv_cache_sequences", MODEL, "{{model}}"),
            Panel(
                "Memory left free when the engine was ready",
                "bytes",
                (
                    (f"sparkd_model_kv_cache_slack_bytes{{{MODEL}}}", "{{model}} slack"),
                    (f"sparkd_model_kv_cache_margin_bytes{{{MODEL}}}", "{{model}} margin"),
                ),
            ),
        ),
    ),
    Row(
        "Reuse",
        (
            share("Prefix hits", "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
            share("Prefix hits outside the engine", "vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total"),
            share("Hits of pictures and sounds", "vllm:mm_cache_hits_total", "vllm:mm_cache_queries_total"),
            flow("Prompt tokens by source", "short", "vllm:prompt_tokens_by_source_total", by="model, source"),
            flow("Cached tokens by tier", "short", "vllm:prompt_tokens_cached_by_source_total", by="model, source"),
            quantiles("Tokens computed in prefill", "vllm:request_prefill_kv_computed_tokens", "short"),
        ),
    ),
)
DRAFTS = (
    Row(
        "Speculative decoding",
        (
            value("Share of the draft that is accepted", "percentunit", "vllm:spec_decode_acceptance_rate:rate1m", ENGINE, "{{model}}"),
            value("Tokens per step", "short", "vllm:spec_decode_mean_accepted_length:rate1m", ENGINE, "{{model}}"),
            value(
                "Accepted by position", "percentunit", "vllm:spec_decode_acceptance_rate_by_pos:rate1m", ENGINE, "{{model}} {{position}}"
            ),
            flow("Tokens", "short", "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
        ),
    ),
)
BOARDS = {
    "sparkd": ("sparkd", SPARKD),
    "vllm-overview": ("sparkd / vLLM overview", OVERVIEW),
    "vllm-instances": ("sparkd / vLLM instances", INSTANCES),
    "vllm-kv-cache": ("sparkd / vLLM KV cache", CACHE),
    "vllm-speculative-decoding": ("sparkd / vLLM speculative decoding", DRAFTS),
}


def board(name: str) -> dict[str, Any]:
    """A board as Grafana 10.4 and newer import it."""
    title, rows = BOARDS[name]
    panels: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        panels.append({"type": "row", "title": row.title, "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1}})
        top += 1
        wide = COLUMNS // min(3, len(row.panels))
        for number, panel in enumerate(row.panels):
            column, line = number % (COLUMNS // wide), number // (COLUMNS // wide)
            panels.append(_panel(panel) | {"gridPos": {"x": column * wide, "y": top + line * HEIGHT, "w": wide, "h": HEIGHT}})
        top += -(-len(row.panels) // (COLUMNS // wide)) * HEIGHT
    return {
        "uid": f"sparkd-{name}"[:40],
        "title": title,
        "tags": ["sparkd"],
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [{"type": "dashboards", "title": "sparkd", "tags": ["sparkd"], "keepTime": True, "includeVars": True, "asDropdown": True}],
        "templating": {"list": [_source(), _choice("node", "sparkd_node_reserved_bytes"), _choice("model", "sparkd_model_info")]},
        "panels": [panel | {"id": number} for number, panel in enumerate(panels, 1)],
    }


def text_of(name: str) -> str:
    return json.dumps(board(name), indent=1, ensure_ascii=False) + "\n"


def _panel(panel: Panel) -> dict[str, Any]:
    is_table = panel.kind == "table"
    custom = {} if is_table else {"fillOpacity": 10, "stacking": {"mode": "normal" if panel.stacked else "none"}}
    return {
        "type": panel.kind,
        "title": panel.title,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": {} if is_table else {"legend": {"showLegend": True, "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            | ({"instant": True, "range": False, "format": "table"} if is_table else {})
            for number, (query, legend) in enumerate(panel.queries)
        ],
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "type": "datasource", "query": "prometheus"}


def _choice(label: str, metric: str) -> dict[str, Any]:
    everything = {"selected": True, "text": ["All"], "value": ["$__all"]}
    query = f"label_values({metric}, {label})"
    return {
        "name": label,
        "type": "query",
        "datasource": SOURCE,
        "query": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": everything,
    }


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in BOARDS:
        (FOLDER / f"{name}.json").write_text(text_of(name), encoding="utf-8")


if __name__ == "__main__":
    main()
