"""The document of the page, what changed in it, and the figures of it that are kept."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from sparkd.admin.live_document import OPERATIONS, Beside, cables_of, document_of, patch_of, series_of
from sparkd.admin.page_answers import LiveDocument
from sparkd.condition import Condition
from sparkd.gateway.rates import Rates
from sparkd.state.nouns import EngineMemory, Machine, ModelState, Operation, OperationState, Progress, RankHandle, Reading
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


def beside(**changes: Any) -> Beside:
    return replace(Beside("b00t", MemoryLimits.of, frozenset({"k"}), {"m": RATES}, last_seq=7), **changes)


def document(**changes: Any) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(msgspec.json.encode(document_of(snapshot(**changes), beside())))
    LiveDocument.model_validate(tree)
    return tree


def test_the_document_has_what_the_page_draws() -> None:
    made = document(conditions=(Condition("RayStarting", "Ray is not connected yet."),))
    node, model = made["nodes"]["n1"], made["models"]["m"]
    assert (made["boot"], made["settled"], made["events"], made["incidents"]) == ("b00t", True, {"last_seq": 7}, {"last_id": None})
    assert made["conditions"] == [{"reason": "RayStarting", "message": "Ray is not connected yet.", "node": None}]
    assert (node["host"], node["uptime_s"], node["disk"]) == ("spark-1", 3720.0, {"total_bytes": 100, "free_bytes": 30})
    assert node["limits"] == {"soft": 6 * GIB, "hard": 4 * GIB, "floor": 2 * GIB}
    assert node["engines"] == [{"model": "m", "host_bytes": GIB, "device_bytes": 40 * GIB}]
    assert (node["reserved_bytes"], node["released_bytes"]) == (int(4.5 * GIB), GIB)
    assert (node["gpu"]["name"], node["gpu"]["throttled"], node["gpu"]["clock_mhz"]) == ("NVIDIA GB10", [], None)
    assert (node["reading"]["node"], node["reading"]["at_s"]) == ("n1", 1000.123)
    assert (model["state"], model["pin"], made["models"]["k"]["pin"]) == ("READY", False, True)
    assert (model["rates"]["kv_usage"], model["rates"]["joules_per_token"], model["rates"]["acceptance"]) == (0.12346, 2.0, [0.9, 0.5])
    assert made["models"]["k"]["rates"] is None


def test_no_private_path_is_in_it() -> None:
    assert "api_key_path" not in document()["models"]["m"]["ranks"][0]


def test_a_node_without_a_reading_has_no_figures() -> None:
    silent = document(nodes=(replace(NODE, reading=None, machine=None, agent=False),))["nodes"]["n1"]
    assert [silent[name] for name in ("reading", "limits", "gpu", "disk", "host", "uptime_s")] == [None] * 6


def test_operations_are_those_that_run_and_the_newest() -> None:
    ended = {str(number): Operation(str(number), "load", "m", OperationState.SUCCEEDED, "", 0.0) for number in range(OPERATIONS + 5)}
    running = {"r": Operation("r", "load", "m", OperationState.RUNNING, "", 0.0, progress=Progress())}
    shown = document(operations=running | ended)["operations"]
    assert (len(shown), "r" in shown, "4" in shown, "5" in shown) == (OPERATIONS + 1, True, False, True)
    assert shown["r"]["progress"]["phase"] == "starting"


def merged(target: Any, patch: Any) -> Any:
    """RFC 7396, section 2, word for word."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def known(tree: Any) -> Any:
    """Without members that are null: for a reader of patches these are the same as none."""
    return {name: known(value) for name, value in tree.items() if value is not None} if isinstance(tree, dict) else tree


TREES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.text("ab", max_size=2),
    lambda inner: (
        st.lists(inner.filter(lambda value: not isinstance(value, dict)), max_size=2)
        | st.dictionaries(st.text("xyz", max_size=1), inner, max_size=3)
    ),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text("xyz", max_size=1), TREES, max_size=4)


@given(OBJECTS, OBJECTS)
def test_a_patch_leads_from_one_tree_to_the_next(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert known(merged(known(before), patch_of(before, after))) == known(after)


def test_only_what_changed_is_said() -> None:
    before = document()
    after = document(nodes=(replace(NODE, reading=replace(READING, mem_available_bytes=1)),), at_s=1001.5)
    assert patch_of(before, after) == {"at_s": 1001.5, "nodes": {"n1": {"reading": {"mem_available_bytes": 1}}}}


def test_the_series_of_a_moment() -> None:
    figures = series_of(snapshot(), {"m": RATES})
    assert figures["node.n1.available_bytes"] == 60 * GIB
    assert (figures["node.n1.psi_full"], figures["node.n1.gpu_power_w"]) == (0.25, 40.0)
    assert "node.n1.gpu_celsius" not in figures
    assert (figures["model.m.memory_bytes"], figures["model.m.running"]) == (41 * GIB, 2.0)
    assert "model.m.waiting" not in figures
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
    assert (shown["a"], shown["b"], shown["rate_gb_s"]) == ("spark-1", "spark-2", 21.5)
    assert (shown["verdict"], shown["problem"]) == ("fail", "worse. Set 9000.")
    (sound,) = cables_of({**report, "findings": []})
    assert (sound["verdict"], sound["problem"]) == ("ok", None)


def test_a_model_that_is_as_it_was_is_taken_over() -> None:
    first = snapshot()
    former = first, document_of(first, beside())
    again = document_of(snapshot(), beside(), former)
    assert again == former[1]
    assert again["models"]["k"] is former[1]["models"]["k"]
    assert again["models"]["m"] is not former[1]["models"]["m"], "its rates are new"
    assert document_of(snapshot(), beside(pins=frozenset()), former)["models"]["k"]["pin"] is False
    assert document_of(snapshot(), beside(rates={"k": RATES}), former)["models"]["k"]["rates"] is not None
    assert document_of(snapshot(), beside(rates={}), former)["models"]["m"]["rates"] is None
    other = replace(snapshot(), models=first.models | {"k": view("k", state=ModelState.FAILED, **FILE)})
    assert document_of(other, beside(), former)["models"]["k"]["state"] == "FAILED"
