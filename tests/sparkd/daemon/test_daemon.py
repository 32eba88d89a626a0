"""The whole daemon with real Ray and the stub engine: loads, swaps, kills, reload, and what its clients and its operator see."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sparkd.capacity.requirement import offered_gib
from sparkd.config.config import Config
from tests.support.daemon_process import DaemonProcess, alive
from tests.support.facts import lacking
from tests.support.processes import members
from tests.support.stage import Stage
from tests.support.stream import held
from tests.support.waiting import until

GIB = 1 << 30
WEIGHTS = {"SPARKD_STUB_LOAD_BYTES": "10000000000"}


@pytest.fixture(scope="module")
def _models(stage: Stage) -> Iterator[None]:
    half_gib = offered_gib(Config()) // 2 + 1
    gated = ("held", "turns", "weights")
    gates = {name: {"SPARKD_STUB_LOAD_GATE": str(stage.gate(name))} for name in gated}
    # The first question is answered as a whole: it waits, and so the model is not READY.
    asked = {"SPARKD_STUB_GATE": str(stage.gate("rehearsed"))}
    models: dict[str, dict[str, Any]] = {
        "quick": {"aliases": ["gpt-4o"], "memory_gib": 3},
        "held": {"env": gates["held"]},
        "tree": {"env": {"SPARKD_STUB_CHILDREN": "3", "SPARKD_STUB_IGNORE_SIGTERM": "1"}},
        "crash": {"env": {"SPARKD_STUB_EXIT_AT": "load", "SPARKD_STUB_EXIT_CODE": "0"}},
        "cut-off": {"env": WEIGHTS | {"SPARKD_STUB_EXIT_AT": "load"}, "quantize": "nvfp4"},
        "greedy": {"kv_cache": {"bytes": "100GiB"}},
        # A loader reports four times a second: it needs some seconds to the gate.
        "weights": {"env": WEIGHTS | gates["weights"] | {"SPARKD_STUB_START_DELAY_S": "8"}, "quantize": "nvfp4"},
        "rehearsed": {"kv_cache": "auto", "env": asked},
        "idle": {"ttl": 1},
        "this": {"memory_gib": half_gib, "env": gates["turns"]},
        "that": {"memory_gib": half_gib, "env": gates["turns"]},
    }
    with stage.serving({name: stage.entry(**keys) for name, keys in models.items()}, loading_heartbeat_s=0.1):
        yield


@pytest.fixture(autouse=True)
def _settled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Models start one at a time: none that a test left on its way is in the way of the next."""
    if "stage" not in request.fixturenames:
        yield
        return
    request.getfixturevalue("_models")
    yield
    request.getfixturevalue("stage").settle()


def test_a_load_is_an_operation_whose_events_and_log_can_be_followed(stage: Stage) -> None:
    stage.stopped("quick")
    kinds: list[str] = []
    headers = {"accept": "text/event-stream", "last-event-id": str(stage.last_seq())}
    with stage.client.stream("GET", "/admin/v1/events", headers=headers) as stream:
        operation = stage.load("quick")
        for line in stream.iter_lines():
            if line.startswith("data: "):
                event = json.loads(line[6:])
                kinds.append(event["kind"])
                if (event["kind"], event["model"]) == ("ready", "quick"):
                    break
    done = stage.ended(operation)

    assert {"want", "state", "started", "ready"} <= set(kinds)
    assert (done["state"], done["kind"], done["model"]) == ("SUCCEEDED", "load", "quick")
    assert stage.chat("quick", "hello").json()["choices"][0]["message"]["content"]
    assert stage.chat("gpt-4o", "hello").status_code == 200
    # A CPU gives two GiB unless it was asked for more.
    assert stage.model("quick")["progress"]["kv"]["pool_bytes"] == 2 * GIB
    assert "Application startup complete" in stage.get("/admin/v1/models/quick/log")["text"]
    with stage.client.stream("GET", "/admin/v1/models/quick/log", params={"follow": "true"}) as stream:
        assert "Loading safetensors" in next(stream.iter_text())


def test_many_requests_at_once_are_one_start_and_streams_hear_of_it(stage: Stage) -> None:
    stage.stopped("held")
    gate, before = stage.gate("held"), stage.last_seq()
    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(stage.chat, "held", "hello") for _ in range(20)]
        streams = [stage.stream("held").start() for _ in range(2)]
        with stage.client_of("held"):
            until(lambda: stage.model("held")["queued"] == 23, "all wait")
        until(lambda: stage.model("held")["queued"] == 22, "one has left")
        assert [stream.text.startswith(": held ") for stream in streams] == [True] * 2
        gate.touch()
        assert {answer.result().status_code for answer in answers} == {200}

    assert [stream.whole() for stream in streams] == [True] * 2
    assert stage.events(before, "started") == ["held"]
    assert stage.model("held")["wanted_by"] == "request"


def test_two_models_that_do_not_fit_side_by_side_take_turns(stage: Stage) -> None:
    stage.stopped("this", "that")
    gate, before = stage.gate("turns"), stage.last_seq()
    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(stage.chat, ("this", "that")[n % 2], "hello") for n in range(20)]
        until(lambda: [stage.model(name)["queued"] for name in ("this", "that")] == [10, 10], "all wait")
        gate.touch()
        assert [answer.result().status_code for answer in answers] == [200] * 20

    started = stage.events(before, "started")
    assert sorted(started) == ["that", "this"], "each was loaded once"
    assert stage.model(started[0])["state"] == "STOPPED"
    assert stage.metric("sparkd_swaps_total", f'model="{started[0]}"') >= 1


def test_the_bytes_of_a_load_reach_everybody_who_watches_and_a_cancelled_one_ends(stage: Stage) -> None:
    operation = stage.load("weights")

    def begun() -> dict[str, Any] | None:
        known = stage.model("weights")["progress"] or {}
        return known if 0 < (known.get("bytes_done") or 0) < 10**10 else None

    seen = until(begun, "bytes of a load") or {}
    shim = stage.pid_of("weights")
    assert (seen["phase"], seen["bytes_total"], seen["units_total"], seen["source"]) == ("loading", 10**10, 100, "checkpoint")
    assert seen["fraction"] == seen["bytes_done"] / 10**10
    assert stage.model("weights")["state"] == "LOADING"
    assert stage.get(f"/admin/v1/operations/{operation}")["progress"]["bytes_total"] == 10**10
    until(lambda: stage.metric("sparkd_model_load_bytes{", 'model="weights"') > 0, "the metric")
    assert stage.metric("sparkd_model_load_total_units", 'model="weights"') == 100
    assert stage.model("weights")["quantize"] == {"format": "nvfp4", "layers": []}

    assert stage.client.delete(f"/admin/v1/operations/{operation}").json()["state"] == "CANCELLED"
    stage.wait_for("weights", "STOPPED")
    assert members(shim) == []
    assert not list(stage.runtime_dir.rglob("weights*.load*"))


@pytest.mark.parametrize(
    ("name", "reason", "words"),
    [
        ("cut-off", "LoadFailed", ["model-2.safetensors", "`sparkd logs cut-off`"]),
        ("greedy", "KvCacheDoesNotFit", ["100.0 GiB", "60.2 GiB", "64.0 GiB", "`sparkd logs greedy`"]),
        ("crash", "CudaOutOfMemory", ["exit code 0"]),
    ],
    ids=["its loader says why", "its cache does not fit", "an exit that was not ordered, whatever its code"],
)
def test_why_a_load_failed_is_the_operations_end(stage: Stage, name: str, reason: str, words: list[str]) -> None:
    ended = stage.ended(stage.load(name))

    assert (ended["state"], lacking(ended["message"], *words)) == ("FAILED", [])
    assert stage.metric("sparkd_model_failures_total", f'model="{name}",reason="{reason}"') >= 1
    assert stage.client.get("/readyz").status_code == 200
    if name == "crash":
        until(lambda: stage.model("crash")["failures"] >= 2, "it is tried again")


def test_how_a_cache_was_sized_reaches_everybody_who_asks_and_the_next_start_remembers(stage: Stage) -> None:
    gate = stage.gate("rehearsed")
    stage.load("rehearsed")
    _first_question(stage, "rehearsed")
    assert stage.model("rehearsed")["progress"]["kv"]["phase"] in ("sized", "ready")
    gate.touch()
    ready = stage.wait_for("rehearsed", "READY")
    kv = ready["progress"]["kv"]
    assert (kv["phase"], kv["source"], kv["rank"], kv["ranks"], kv["why"]) == ("ready", "rehearsal", 0, 1, None)
    assert kv["tokens"] == ready["progress"]["kv_tokens"] == kv["pool_bytes"] // 2048
    # Of a GiB, what the stub says that it holds, and its largest batch.
    assert kv["pool_bytes"] == GIB - GIB // 4 - GIB // 16 * 5 // 4
    assert stage.metric("sparkd_model_kv_cache_tokens", 'model="rehearsed"') == kv["tokens"]
    assert stage.metric("sparkd_model_kv_cache_bytes", 'model="rehearsed"') == kv["pool_bytes"]
    assert list((stage.state_dir / "kv-profiles").glob("*.json"))

    stage.stopped("rehearsed")
    assert not list(stage.runtime_dir.rglob("rehearsed*.kv*"))
    assert 'sparkd_model_kv_cache_tokens{model="rehearsed"' not in stage.client.get("/metrics").text
    assert stage.ready("rehearsed")["progress"]["kv"]["source"] == "profile"


def test_unloading_ends_the_whole_tree_of_processes(stage: Stage) -> None:
    stage.ready("tree")
    tree = members(stage.pid_of("tree"))
    assert len(tree) >= 5

    stage.stopped("tree")

    assert [pid for pid in tree if alive(pid)] == []


@pytest.mark.rest
def test_an_idle_model_goes_after_its_ttl(stage: Stage) -> None:
    assert stage.chat("idle", "hello").status_code == 200
    stage.wait_for("idle", "STOPPED")

    assert stage.model("idle")["wanted_by"] == "ttl"


def test_an_engine_that_is_killed_comes_back(stage: Stage) -> None:
    stage.ready("quick")
    first, before = stage.pid_of("quick"), stage.last_seq()
    os.kill(first, signal.SIGKILL)
    until(lambda: first not in (pids := stage.pids_of("quick")) and pids, "a new rank")
    stage.wait_for("quick", "READY")

    assert stage.events(before, "failed") == stage.events(before, "started") == ["quick"]
    assert stage.chat("quick", "hello").status_code == 200


@pytest.mark.rest
def test_the_agent_actor_dies_and_the_engine_does_not_notice(stage: Stage) -> None:
    rank, failures = _serving(stage)
    (agent,) = _agents(stage)
    os.kill(agent, signal.SIGKILL)

    assert stage.chat("quick", "hello").status_code == 200
    until(lambda: _agents(stage) not in ([], [agent]), "Ray starts the agent again", 0.3)
    until(lambda: stage.status()["nodes"][0]["agent"], "it answers", 0.2)
    assert _serving(stage) == (rank, failures)


@pytest.mark.rest
def test_the_raylet_dies_and_everything_recovers_around_the_living_engine(stage: Stage) -> None:
    rank, failures = _serving(stage)
    before = stage.ray_pids()
    (raylet,) = [process["pid"] for process in stage.status()["costs"]["ray"] if process["name"] == "raylet"]

    def told() -> list[str | None]:
        events = stage.client.get("/admin/v1/events", params={"limit": 1000}).json()["events"]
        return [event["data"].get("reason") for event in events if event["kind"] == "cluster"]

    earlier = len(told())
    os.kill(raylet, signal.SIGKILL)

    assert stage.chat("quick", "hello").status_code == 200
    until(lambda: raylet not in stage.ray_pids() and stage.status()["nodes"][0]["agent"], "another raylet with its agent", 0.3)
    stage.ray_connected()
    assert _serving(stage) == (rank, failures)
    until(lambda: "RayUnavailable" in told()[earlier:], "an event of its end", 0.3)
    until(lambda: [pid for pid in before if alive(pid)] == [], "nothing of the old Ray is left")
    stage.stopped("quick")
    stage.ready("quick")


def test_engine_metrics_pass_through_with_labels_and_are_there_while_the_engine_hangs(stage: Stage) -> None:
    stage.ready("quick")
    mine = ("vllm:num_requests_running{", 'model="quick"', 'node="127.0.0.1"')
    until(lambda: stage.metric(*mine) >= 0, "a scrape", 0.3)
    ready = ("sparkd_model_state{", 'model="quick"', 'state="READY"')
    until(lambda: stage.metric(*ready) == 1, "the gauges of the next look", 0.3)
    assert stage.client.get("/metrics").text.count("# TYPE vllm:num_requests_running") == 1

    shim = stage.pid_of("quick")
    engine = [pid for pid in members(shim) if pid != shim]
    assert engine
    for pid in engine:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert stage.metric(*ready) == 1
        assert stage.client.get("/livez").status_code == 200
    finally:
        for pid in engine:
            os.kill(pid, signal.SIGCONT)


def test_ray_listens_on_loopback_only_and_its_token_is_private(stage: Stage) -> None:
    listeners = stage.status()["costs"]["ray_listeners"]

    assert listeners
    assert [where for where in listeners if "127.0.0.1:" not in where] == []
    assert not [where for where in listeners if where.split()[0].endswith((":8265", ":10001"))]
    # Two processes of Ray's dashboard are there with every head, as README.md says, and listen on nothing.
    dashboard = {"python", "ray::DashboardA"}
    assert dashboard <= {process["name"] for process in stage.status()["costs"]["ray"]}
    assert dashboard.isdisjoint(where.partition(" ")[2] for where in listeners)
    assert (stage.state_dir / "ray.token").stat().st_mode & 0o077 == 0


def test_a_reload_takes_a_good_file_and_refuses_a_bad_one_while_streams_go_on(stage: Stage, tmp_path: Path) -> None:
    stage.ready("quick")
    rank, given = stage.pid_of("quick"), stage.given
    stream = stage.stream("quick", **held(tmp_path / "gate")).start()

    def hang_up(models: dict[str, Any]) -> None:
        stage.configure(given | {"models": given["models"] | models})
        stage.process.send_signal(signal.SIGHUP)  # type: ignore[union-attr]

    hang_up({"second": stage.entry()})
    until(lambda: stage.model("second").get("state"), "the new model is known")
    stage.config.write_text("modles: {}\n")
    stage.process.send_signal(signal.SIGHUP)  # type: ignore[union-attr]
    until(lambda: _refusal(stage, "modles"), "the file is refused")
    file = tmp_path / "weights.gguf"
    file.touch()
    hang_up({"second": stage.entry(), "quick": given["models"]["quick"] | {"model": str(file)}})
    until(lambda: _refusal(stage, "models.quick.model"), "the entry of a model that serves is refused")
    assert stage.model("second")["state"] == "STOPPED"
    changes = stage.reload(given)
    (tmp_path / "gate").touch()

    assert stream.whole()
    assert (changes["removed"], changes["restarted"]) == (["second"], [])
    assert stage.pid_of("quick") == rank
    assert stage.status()["conditions"] == []


def test_a_daemon_whose_port_is_taken_says_so_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        made = DaemonProcess(tmp_path, {})
        made.port = other.getsockname()[1]
        made.configure({})
        made.start()
        assert made.process is not None
        assert made.process.wait() == 2
    made.client.close()
    assert str(made.port) in made.tail()
    assert "Traceback" not in made.tail()
    assert not made.runtime_dir.exists()


def _first_question(stage: Stage, name: str) -> None:
    """The engine of a model is up and has not answered yet."""
    until(lambda: (stage.model(name)["progress"] or {}).get("server_up"), f"the server of {name}")
    assert stage.model(name)["state"] != "READY"


def _serving(stage: Stage) -> tuple[int, int]:
    """The rank of a model that is READY, and how often it has failed."""
    stage.ready("quick")
    return stage.pid_of("quick"), stage.model("quick")["failures"]


def _agents(stage: Stage) -> list[int]:
    return [process["pid"] for process in stage.status().get("costs", {}).get("ray", []) if process["name"].startswith("ray::Agent")]


def _refusal(stage: Stage, word: str) -> bool:
    return any("ConfigRefused" in told and word in told for told in stage.status()["conditions"])
