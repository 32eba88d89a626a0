"""Every alert of deploy/observability fires when it should and keeps quiet when it should, as promtool evaluates it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.support.observability import ALERT_RULES, ALERTS, FOLDER, RECORDING_RULES, promtool

GIB = 1 << 30
NODE = '{job="sparkd",instance="s:4000",node="n"'
MODEL = '{job="sparkd",instance="s:4000",model="m"'
ENGINE = '{job="sparkd",instance="n/m",model="m",node="n",model_name="m",engine="0"'
PAIR = '{job="sparkd",instance="s:4000",a="n",b="o"}'


@dataclass(frozen=True)
class Case:
    """Series in promtool's notation, one sample each 5 s. The alert fires at `at` with `fires` and not with `quiet`.

    before: a moment at which it does not fire yet; None for one that fires at once.
    """

    fires: dict[str, str]
    quiet: list[dict[str, str]]
    at: str = "1m"
    before: str | None = None


def level(value: int) -> dict[str, str]:
    return {f"sparkd_node_memory_level{NODE}}}": f"{value}x200"}


def memory(values: str, state: str = "READY") -> dict[str, str]:
    return {
        f"sparkd_node_mem_available_bytes{NODE}}}": values,
        f'sparkd_node_mem_limit_bytes{NODE},limit="floor"}}': f"{2 * GIB}x200",
        f'sparkd_node_mem_limit_bytes{NODE},limit="soft"}}': f"{90 * GIB}x200",
        f'sparkd_model_state{MODEL},state="{state}"}}': "1x200",
    }


def gpu(watts: float, share: float, celsius: float = 50) -> dict[str, str]:
    return {
        f"sparkd_gpu_power_draw_watts{NODE}}}": f"{watts}x200",
        f"sparkd_gpu_utilization_ratio{NODE}}}": f"{share}x200",
        f"sparkd_gpu_temperature_celsius{NODE}}}": f"{celsius}x200",
    }


def cable(rate: float, normal: float | None) -> dict[str, str]:
    series = {f"sparkd_fabric_rate_bytes_per_second{PAIR}": f"{rate}x200"}
    return series if normal is None else series | {f"sparkd_fabric_normal_rate_bytes_per_second{PAIR}": f"{normal}x200"}


def cache(used: float, waiting: int) -> dict[str, str]:
    return {f"vllm:kv_cache_usage_perc{ENGINE}}}": f"{used}x200", f"vllm:num_requests_waiting{ENGINE}}}": f"{waiting}x200"}


def first_tokens(within_10_s: float) -> dict[str, str]:
    """One request each 5 s, of which so large a share is answered within 10 s and the others within 40 s."""
    buckets = {"10": within_10_s, "40": 1.0, "+Inf": 1.0}
    name = "vllm:time_to_first_token_seconds_bucket"
    return {f'{name}{ENGINE},le="{bound}"}}': f"0+{share}x200" for bound, share in buckets.items()}


def drafts(drafted: int, accepted: int) -> dict[str, str]:
    return {
        f"vllm:spec_decode_num_draft_tokens_total{ENGINE}}}": f"0+{drafted}x300",
        f"vllm:spec_decode_num_accepted_tokens_total{ENGINE}}}": f"0+{accepted}x300",
    }


CASES = {
    "SparkdMemoryCritical": Case(level(3), [level(2), level(0)]),
    "SparkdGuardAbsent": Case({f"sparkd_node_guarded{NODE}}}": "0x200"}, [{f"sparkd_node_guarded{NODE}}}": "1x200"}]),
    "SparkdMemoryFloorAhead": Case(
        memory(f"{40 * GIB}-{4 * GIB}x6"),
        [
            memory(f"{40 * GIB}x200"),
            memory(f"{110 * GIB}-{4 * GIB}x200"),
            memory(f"{40 * GIB}-{4 * GIB}x6", state="LOADING"),
            memory(f"{1 * GIB}+{1 * GIB}x200"),
        ],
        at="30s",
        before="5s",
    ),
    "SparkdMemoryNotReleased": Case(
        {f"sparkd_release_leaked_bytes{NODE}}}": f"{5 * GIB}x200"},
        [{f"sparkd_release_leaked_bytes{NODE}}}": f"{GIB}x200"}],
    ),
    "SparkdGuardActed": Case(
        {f'sparkd_guard_actions_total{MODEL},action="kill"}}': "0x5 1x195"},
        [{f'sparkd_guard_actions_total{MODEL},action="kill"}}': "3x200"}],
    ),
    "SparkdReadingOld": Case(
        {f"sparkd_node_reading_age_seconds{NODE}}}": "0.5 0+5x200"},
        [{f"sparkd_node_reading_age_seconds{NODE}}}": "0.5x200"}],
    ),
    "SparkdEngineHung": Case(
        {f"sparkd_watchdog_stalls_total{MODEL}}}": "0x5 1x195"},
        [{f"sparkd_watchdog_stalls_total{MODEL}}}": "2x200"}],
    ),
    "SparkdModelFailed": Case(
        {f'sparkd_model_state{MODEL},state="FAILED"}}': "1x200"},
        [
            {f'sparkd_model_state{MODEL},state="FAILED"}}': "0x200", f'sparkd_model_state{MODEL},state="READY"}}': "1x200"},
            {f'sparkd_model_state{MODEL},state="FAILED"}}': "1x40 0x1 1x150"},
        ],
        at="6m",
        before="4m",
    ),
    "SparkdKvCacheFull": Case(cache(0.99, 4), [cache(0.99, 0), cache(0.9, 4)], at="3m", before="1m"),
    "SparkdFirstTokenSlow": Case(first_tokens(0.5), [first_tokens(0.99)], at="10m", before="4m"),
    "SparkdDraftRejected": Case(drafts(10, 2), [drafts(10, 7), drafts(0, 0)], at="15m", before="9m"),
    "SparkdQueueStands": Case(
        {f"sparkd_queue_depth{MODEL}}}": "2x200"},
        [{f"sparkd_queue_depth{MODEL}}}": "0x200"}, {f"sparkd_queue_depth{MODEL}}}": "2x40 0x1 2x150"}],
        at="6m",
        before="4m",
    ),
    "SparkdGpuStuck": Case(gpu(12, 0.96), [gpu(80, 0.96), gpu(12, 0.05)], at="3m", before="1m"),
    "SparkdGpuHot": Case(gpu(80, 0.96, celsius=90), [gpu(80, 0.96, celsius=85)], at="2m", before="30s"),
    "SparkdCableSlow": Case(cable(13e9, 20e9), [cable(18e9, 20e9), cable(1e9, None)]),
    "SparkdDown": Case({'up{job="sparkd",instance="s:4000"}': "0x200"}, [{'up{job="sparkd",instance="s:4000"}': "1x200"}], before="10s"),
}


def test_every_alert_has_a_case_and_every_case_an_alert() -> None:
    assert sorted(CASES) == sorted(rule["alert"] for rule in ALERTS)


def test_each_fires_and_keeps_quiet(tmp_path: Path) -> None:
    """One run of promtool, which prints expression and moment of what fails. Rules that wait for minutes are evaluated less often."""
    tests: dict[str, list[object]] = {"5s": [], "30s": []}
    for alert, case in CASES.items():
        scenes = tests["30s" if case.at.endswith("m") and case.at != "1m" else "5s"]
        scenes.append(scene(case.fires, {case.at: {alert}} | ({case.before: set()} if case.before else {})))
        scenes += [scene(series, {case.at: set()}) for series in case.quiet]
    rules = [str(RECORDING_RULES), str(ALERT_RULES)]
    for every, scenes in tests.items():
        (tmp_path / f"{every}.yml").write_text(yaml.safe_dump({"rule_files": rules, "evaluation_interval": every, "tests": scenes}))
    done = subprocess.run([promtool(), "test", "rules", *sorted(tmp_path.iterdir())], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_configuration_and_its_rules() -> None:
    done = subprocess.run([promtool(), "check", "config", str(FOLDER / "prometheus.yml")], capture_output=True, text=True, check=False)
    assert (done.returncode, "FAILED" in done.stdout) == (0, False), done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def scene(series: dict[str, str], firing: dict[str, set[str]]) -> dict[str, object]:
    """firing: by moment, the alerts that fire then and no others."""
    expr = 'count by (alertname) (ALERTS{alertstate="firing"})'
    return {
        "interval": "5s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": expr, "eval_time": at, "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(names)]}
            for at, names in firing.items()
        ],
    }
