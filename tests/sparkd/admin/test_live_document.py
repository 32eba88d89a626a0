"""The document of the page, and the figures of it that are kept."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from sparkd.admin.live_document import OPERATIONS, LiveDocument, NodeAnswers, cables_of, document_of, series_of
from sparkd.condition import Condition
from sparkd.gateway.rates import Rates
from sparkd.state.model_state import ModelState
from sparkd.state.nouns import EngineMemory, Machine, Operation, OperationState, Progress, RankHandle, Reading
from sparkd.state.snapshot import NodeView, Snapshot
from tests.sparkd.gateway.fakes import view
from workers.host.memory_limits import MemoryLimits

GIB = 1 << 30
READING = Reading(
    "n1", 1000.123456, 120 * GIB, 60 * GIB, 50 * GIB, 7 * GIB, 0, 0, psi_full_avg10=0.25, unaccounted_bytes=3 * GIB, gpu_power_w=40.0,
    gpu_throttled=(), gpu_name="NVIDIA GB10",
)  # fmt: skip
NODE = NodeView("n1", "n1", True, True, READING, 121.0, 4.5, Machine("spark-1", 3723.9, 100, 30))
HANDLE = RankHandle("m-1", "m", 1, "n1", 0, 1, 2, "b", "/run/x.sock", None, None, "/run/key", "h", "/log", 0.0)
FILE: dict[str, Any] = {"origin": "file", "transport": ()}
RATES = Rates(prompt_tokens_per_s=100.0, generation_tokens_per_s=20.0, running=2.0, kv_usage=0.123456789, acceptance=(0.9, 0.5))


def snapshot(**changes: Any) -> Snapshot:
    models = {"m": view("m", ranks=(HANDLE,), progress=Progress(phase="serving"), **FILE), "k": view("k", state=ModelState.STOPPED, **FILE)}
    engines = (EngineMemory("m", "n1", GIB, 40 * GIB),)
    return replace(Snapshot(1000.5, True, False, 0.1, models, (NODE,), {}, engines=engines, returning_bytes={"n1": GIB}), **changes)


def document(**changes: Any) -> dict[str, Any]:
    made = document_of(snapshot(**changes), {"m": RATES}, frozenset({"k"}), MemoryLimits.of, 7, NodeAnswers())
    tree: dict[str, Any] = json.loads(TypeAdapter(LiveDocument).dump_json(made, by_alias=True))
    return tree


def test_the_document_has_what_the_page_draws() -> None:
    made = document(conditions=(Condition("RayStarting", "Ray is not connected yet."),))
    node, model = made["nodes"]["n1"], made["models"]["m"]
    assert (made["settled"], made["last_event"], made["last_incident"]) == (True, 7, None)
    assert made["conditions"] == [{"reason": "RayStarting", "message": "Ray is not connected yet.", "node": None}]
    assert node["machine"] == {"host": "spark-1", "uptime_s": 3723.9, "disk_total_bytes": 100, "disk_free_bytes": 30}
    assert node["limits"] == {"soft": 6 * GIB, "hard": 4 * GIB, "floor": 2 * GIB}
    assert node["engines"] == [{"model": "m", "node": "n1", "host_bytes": GIB, "device_bytes": 40 * GIB}]
    assert (node["reserved_gib"], node["returning_bytes"]) == (4.5, GIB)
    assert (node["reading"]["node"], node["reading"]["gpu_name"], node["reading"]["gpu_throttled"]) == ("n1", "NVIDIA GB10", [])
    assert (model["state"], model["pin"], made["models"]["k"]["pin"]) == ("READY", False, True)
    assert (model["rates"]["kv_usage"], model["joules_per_token"], model["rates"]["acceptance"]) == (0.123456789, 2.0, [0.9, 0.5])
    assert made["models"]["k"]["rates"] is None


def test_an_engine_that_shares_a_node_has_no_joules_per_token() -> None:
    engines = (EngineMemory("m", "n1", GIB, 40 * GIB), EngineMemory("k", "n1", GIB, GIB))
    assert document(engines=engines)["models"]["m"]["joules_per_token"] is None


def test_no_private_path_is_in_it() -> None:
    assert "api_key_path" not in document()["models"]["m"]["ranks"][0]


def test_a_node_without_a_reading_has_no_figures() -> None:
    silent = document(nodes=(replace(NODE, reading=None, machine=None, agent=False),))["nodes"]["n1"]
    assert [silent[name] for name in ("reading", "limits", "machine")] == [None] * 3


def test_operations_are_those_that_run_and_the_newest() -> None:
    ended = {str(number): Operation(str(number), "load", "m", OperationState.SUCCEEDED, "", 0.0) for number in range(OPERATIONS + 5)}
    running = {"r": Operation("r", "load", "m", OperationState.RUNNING, "", 0.0, progress=Progress())}
    shown = document(operations=running | ended)["operations"]
    assert (len(shown), "r" in shown, "4" in shown, "5" in shown) == (OPERATIONS + 1, True, False, True)
    assert shown["r"]["progress"]["phase"] == "starting"


def test_the_series_of_a_moment() -> None:
    figures = series_of(snapshot(), {"m": RATES})
    assert figures["node.n1.available_bytes"] == 60 * GIB
    assert (figures["node.n1.psi_full"], figures["node.n1.gpu_power_w"]) == (0.25, 40.0)
    assert figures["node.n1.gpu_celsius"] is None
    assert (figures["model.m.memory_bytes"], figures["model.m.running"]) == (41 * GIB, 2.0)
    assert figures["model.m.waiting"] is None
    assert not [name for name in figures if name.startswith("model.k.")]


def test_a_cable_has_its_rate_and_its_worst_finding() -> None:
    cable = {"a": "spark-1", "a_cage": "cage 1", "b": "spark-2", "b_cage": "cage 1", "seen": True, "rails": []}
    finding = {
        "check": "mtu",
        "verdict": "warn",
        "node": "spark-1 - spark-2",
        "about": "cage 1 - cage 1",
        "evidence": "MTU 1500",
        "cure": "Set 9000.",
    }
    report = {
        "cables": [cable],
        "rates": [{"a": "spark-2", "b": "spark-1", "gb_s": 21.5}],
        "findings": [
            finding,
            {**finding, "verdict": "fail", "evidence": "worse", "check": "rate"},
            {**finding, "about": "another", "verdict": "fail"},
        ],
    }
    (shown,) = cables_of(report)
    assert (shown.a, shown.b, shown.rate_gb_s) == ("spark-1", "spark-2", 21.5)
    assert (shown.verdict, shown.problem) == ("fail", "worse. Set 9000.")
    (sound,) = cables_of({**report, "findings": []})
    assert (sound.verdict, sound.problem) == ("ok", None)
