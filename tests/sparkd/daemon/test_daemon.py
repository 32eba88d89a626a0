"""The whole daemon with real Ray and the stub engine: loads, kills, adoption, reload, and what is left at the end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from sparkd.capacity.reservation import offered_gib
from sparkd.config.config import Config
from tests.support.daemon_process import DaemonProcess, alive, daemon
from tests.support.facts import lacking
from tests.support.waiting import until

WEIGHTS = {"SPARKD_STUB_LOAD_BYTES": "10000000000"}
GIB = 1 << 30
BACKOFF = {"initial_s": 0.2, "max_s": 1, "jitter": 0}


def model(folder: Path, **keys: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    return {"model": str(folder), "memory_gib": 1} | keys


def settings(folder: Path, **models: dict[str, Any]) -> dict[str, Any]:
    given = {name.replace("_", "-"): model(folder / "model", **keys) for name, keys in models.items()}
    return {
        "engine": {"entrypoint": "workers.stub", "stop_timeout_s": 2},
        "backoff": BACKOFF,
        "loading_heartbeat_s": 0.5,
        "min_residency_s": 0,
        "swap_idle_s": 0,
        "models": given,
    }


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("daemon")
    slow = {"SPARKD_STUB_START_DELAY_S": "3"}
    given = settings(
        folder,
        quick={"aliases": ["gpt-4o"], "memory_gib": 3},
        slow={"env": slow, "wait_for_load_s": 30},
        chatty={"env": slow},
        abandoned={"env": {"SPARKD_STUB_START_DELAY_S": "30"}},
        impatient={"env": slow, "wait_for_load_s": 0.3},
        tree={"env": {"SPARKD_STUB_CHILDREN": "3", "SPARKD_STUB_IGNORE_SIGTERM": "1"}},
        crash={"env": {"SPARKD_STUB_EXIT_AT": "load", "SPARKD_STUB_EXIT_CODE": "0"}},
        idle={"ttl": 1},
        weights={"env": WEIGHTS | {"SPARKD_STUB_START_DELAY_S": "20"}, "quantize": "nvfp4"},
        cut_off={"env": WEIGHTS | {"SPARKD_STUB_EXIT_AT": "load"}, "quantize": "nvfp4"},
        greedy={"kv_cache": {"bytes": "100GiB"}},
        rehearsed={"kv_cache": "auto", "env": {"SPARKD_STUB_START_DELAY_S": "3"}},
        stock={"gpu_memory_utilization": 0.1},
        this={"memory_gib": offered_gib(Config()) // 2 + 1},
        that={"memory_gib": offered_gib(Config()) // 2 + 1},
        curled={"memory_gib": offered_gib(Config()) // 2 + 1, "env": {"SPARKD_STUB_START_DELAY_S": "4"}},
        lazy={"env": {"SPARKD_STUB_FIRST_DELAY_S": "30"}, "health_check_timeout_s": 60},
    )
    with daemon(folder, given) as made:
        made.ray_connected()
        yield made


@pytest.fixture(autouse=True)
def _unload_all(request: pytest.FixtureRequest) -> Iterator[None]:
    """Models start at one at a time: none of one test is left for the next."""
    yield
    if "stage" in request.fixturenames:
        made: DaemonProcess = request.getfixturevalue("stage")
        for found in made.get("/admin/v1/models")["models"]:
            if found["state"] != "STOPPED":
                made.unload(found["name"])
                made.wait_for(found["name"], "STOPPED")


def test_a_load_is_an_operation_that_can_be_waited_for(stage: DaemonProcess) -> None:
    operation = stage.load("quick")
    done = stage.client.get(f"/admin/v1/operations/{operation}", params={"wait_s": 30}).json()

    assert (done["state"], done["kind"], done["model"]) == ("SUCCEEDED", "load", "quick")
    assert stage.chat("quick", "hello").json()["choices"][0]["message"]["content"]
    assert stage.chat("gpt-4o", "hello").status_code == 200


def test_a_request_starts_a_stopped_model_and_waits_for_it(stage: DaemonProcess) -> None:
    response = stage.chat("slow", "hello")

    assert response.status_code == 200
    assert stage.model("slow")["wanted_by"] == "request"


def test_a_request_that_waits_too_long_gets_503_with_the_progress(stage: DaemonProcess) -> None:
    response = stage.chat("impatient", "hello")

    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "model_loading"
    assert response.json()["error"]["src"] == "sparkd"
    assert response.json()["loading"]["model"] == "impatient"


def test_a_hundred_requests_at_once_are_one_start_and_streams_hear_of_it(stage: DaemonProcess) -> None:
    body = {"model": "chatty", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    with ThreadPoolExecutor(100) as pool:
        many = [pool.submit(stage.client.post, "/v1/chat/completions", json=body | {"stream": n % 10 == 0}, timeout=60) for n in range(100)]
        answers = [one.result() for one in many]

    assert {answer.status_code for answer in answers} == {200}
    for answer in answers[::10]:
        assert answer.text.startswith(": chatty ")
        assert answer.text.endswith("data: [DONE]\n\n")
    events = stage.get("/admin/v1/events?limit=1000")["events"]
    assert [event["model"] for event in events if event["kind"] == "started"].count("chatty") == 1


def test_two_models_that_do_not_fit_side_by_side_take_turns(stage: DaemonProcess) -> None:
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda n: stage.chat(("this", "that")[n % 2], "hello").status_code, range(20)))

    assert answers == [200] * 20
    events = stage.get("/admin/v1/events?limit=1000")["events"]
    started = [event["model"] for event in events if event["kind"] == "started" and event["model"] in ("this", "that")]
    assert sorted(started) == ["that", "this"], "each was loaded once"
    assert stage.metric("sparkd_swaps_total", f'model="{started[0]}"') == 1


def test_a_client_that_leaves_while_another_model_goes_for_it_does_not_empty_the_machine(stage: DaemonProcess) -> None:
    assert stage.chat("this", "hello").status_code == 200
    with pytest.raises(httpx.ReadTimeout):
        stage.client.post("/v1/chat/completions", json={"model": "curled", "messages": []}, timeout=3)

    assert stage.wait_for("curled", "READY")["wanted_by"] == "request"
    assert stage.model("this")["state"] == "STOPPED"


def test_a_load_that_its_last_client_leaves_is_ended(stage: DaemonProcess) -> None:
    with pytest.raises(httpx.ReadTimeout):
        stage.client.post("/v1/chat/completions", json={"model": "abandoned", "messages": []}, timeout=1.5)

    stage.wait_for("abandoned", "STOPPED")
    assert stage.model("abandoned")["wanted_by"] == "request"


def test_progress_is_read_from_the_log_and_shown(stage: DaemonProcess) -> None:
    stage.load("slow")
    seen = until(lambda: stage.model("slow")["progress"], "progress")
    assert seen["phase"] in ("starting", "loading", "warming", "sizing", "serving")
    ready = stage.wait_for("slow", "READY")

    assert ready["progress"]["kv_tokens"] > 0
    assert ready["load_s"] > 2


def test_the_bytes_of_a_load_reach_everybody_who_watches_and_a_cancelled_one_ends(stage: DaemonProcess) -> None:
    operation = stage.load("weights")

    def halfway() -> dict[str, Any] | None:
        known = stage.model("weights")["progress"] or {}
        return known if 0 < (known.get("bytes_done") or 0) < 10**10 else None

    seen = until(halfway, "bytes of a load")
    shim = stage.pid_of("weights")
    assert (seen["phase"], seen["bytes_total"], seen["units_total"], seen["source"]) == ("loading", 10**10, 100, "checkpoint")
    assert seen["fraction"] == seen["bytes_done"] / 10**10
    asked = stage.get(f"/admin/v1/operations/{operation}")["progress"]
    assert asked["bytes_total"] == 10**10
    until(lambda: stage.metric("sparkd_model_load_bytes{", 'model="weights"') > 0, "the metric")
    assert stage.metric("sparkd_model_load_total_units", 'model="weights"') == 100
    assert stage.model("weights")["quantize"] == {"format": "nvfp4", "layers": []}

    assert stage.client.delete(f"/admin/v1/operations/{operation}").json()["state"] == "CANCELLED"
    stage.wait_for("weights", "STOPPED")
    assert [pid for pid in _members(shim) if alive(pid)] == []
    assert not list(stage.runtime_dir.rglob("*.load*"))


def test_why_a_load_failed_is_what_its_loader_says(stage: DaemonProcess) -> None:
    operation = stage.load("cut-off")
    ended = stage.client.get(f"/admin/v1/operations/{operation}", params={"wait_s": 30}).json()
    why = "model-2.safetensors: layers.1.weight: it is cut off, as the stub was told. Fetch the file again. See `sparkd logs cut-off`."

    assert (ended["state"], ended["message"]) == ("FAILED", why)
    assert stage.metric("sparkd_model_failures_total", 'model="cut-off",reason="LoadFailed"') >= 1


def test_how_a_cache_was_sized_reaches_everybody_who_asks_and_the_next_start_remembers(stage: DaemonProcess) -> None:
    stage.load("rehearsed")
    sizing = until(lambda: stage.model("rehearsed") if stage.model("rehearsed")["state"] == "SIZING" else None, "SIZING")
    assert sizing["progress"]["kv"]["phase"] in ("rehearsing", "sized")
    ready = stage.wait_for("rehearsed", "READY")
    kv = ready["progress"]["kv"]
    assert (kv["phase"], kv["source"], kv["rank"], kv["ranks"], kv["why"]) == ("ready", "rehearsal", 0, 1, None)
    assert kv["tokens"] == ready["progress"]["kv_tokens"] == kv["pool_bytes"] // 2048
    # Of a GiB, what the stub says that it holds, and its largest batch.
    assert kv["pool_bytes"] == GIB - GIB // 4 - GIB // 16 * 5 // 4
    assert stage.metric("sparkd_model_kv_cache_tokens", 'model="rehearsed"') == kv["tokens"]
    assert stage.metric("sparkd_model_kv_cache_bytes", 'model="rehearsed"') == kv["pool_bytes"]
    assert list((stage.state_dir / "kv-profiles").glob("*.json"))

    stage.unload("rehearsed")
    stage.wait_for("rehearsed", "STOPPED")
    assert not list(stage.runtime_dir.rglob("*.kv*"))
    assert 'sparkd_model_kv_cache_tokens{model="rehearsed"' not in stage.client.get("/metrics").text
    stage.load("rehearsed")
    assert stage.wait_for("rehearsed", "READY")["progress"]["kv"]["source"] == "profile"


def test_a_cpu_gives_two_gib_unless_it_was_asked_for_more(stage: DaemonProcess) -> None:
    stage.load("quick")
    assert stage.wait_for("quick", "READY")["progress"]["kv"]["pool_bytes"] == 2 << 30

    stage.load("stock")
    # vLLM sizes: what its log tells is told, and nothing else is known.
    kv = stage.wait_for("stock", "READY")["progress"]["kv"]
    assert (kv["phase"], kv["source"], kv["margin_bytes"], kv["pool_bytes"]) == ("stock", None, None, 1 << 30)


def test_a_cache_that_does_not_fit_is_refused_with_the_arithmetic(stage: DaemonProcess) -> None:
    operation = stage.load("greedy")
    ended = stage.client.get(f"/admin/v1/operations/{operation}", params={"wait_s": 30}).json()

    assert ended["state"] == "FAILED"
    assert lacking(ended["message"], "100.0 GiB", "62.0 GiB", "64.0 GiB", "`sparkd logs greedy`") == []
    assert stage.metric("sparkd_model_failures_total", 'model="greedy",reason="KvCacheDoesNotFit"') >= 1


def test_a_client_that_leaves_while_it_waits_is_no_longer_queued(stage: DaemonProcess) -> None:
    stage.load("slow")
    body = b'{"model": "slow", "messages": []}'
    with socket.create_connection(("127.0.0.1", stage.port)) as client:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        until(lambda: stage.model("slow")["queued"] == 1, "it waits")
    until(lambda: stage.model("slow")["queued"] == 0, "it waits no longer")


def test_unloading_ends_the_whole_tree_of_processes(stage: DaemonProcess) -> None:
    stage.load("tree")
    stage.wait_for("tree", "READY")
    shim = stage.pid_of("tree")
    tree = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _session(int(entry.name)) == shim]
    assert len(tree) >= 5

    stage.unload("tree")
    stage.wait_for("tree", "STOPPED")

    assert [pid for pid in tree if alive(pid)] == []


def test_an_exit_that_nobody_ordered_is_a_failure_whatever_its_code(stage: DaemonProcess) -> None:
    stage.load("crash")
    failed = stage.wait_for("crash", "FAILED")

    assert failed["reason"] == "CudaOutOfMemory", "as its log says"
    assert "exit code 0" in failed["message"]
    assert stage.client.get("/readyz").status_code == 200
    until(lambda: stage.model("crash")["failures"] >= 3, "it is tried again")


def test_an_idle_model_goes_after_its_ttl(stage: DaemonProcess) -> None:
    assert stage.chat("idle", "hello").status_code == 200
    stage.wait_for("idle", "STOPPED")

    assert stage.model("idle")["wanted_by"] == "ttl"


def test_cancelling_a_load_stops_it(stage: DaemonProcess) -> None:
    operation = stage.load("slow")
    until(lambda: stage.model("slow")["state"] in ("LOADING", "WARMING"), "it loads")
    cancelled = stage.client.delete(f"/admin/v1/operations/{operation}").json()

    assert cancelled["state"] == "CANCELLED"
    stage.wait_for("slow", "STOPPED")


@pytest.mark.parametrize("state", ["LOADING", "SIZING", "READY"])
def test_an_engine_that_is_killed_comes_back(stage: DaemonProcess, state: str) -> None:
    """SIZING stands for: the server is up and the first question is being answered."""
    name = {"LOADING": "slow", "SIZING": "lazy", "READY": "quick"}[state]
    stage.load(name)
    first = until(lambda: _killable(stage, name, state), f"{name} {state}")
    os.kill(first, signal.SIGKILL)
    until(lambda: stage.model(name)["failures"] >= 1, "the failure is seen")
    until(lambda: first not in (pids := stage.pids_of(name)) and pids, "a new rank")

    if state != "SIZING":
        stage.wait_for(name, "READY")


def test_the_agent_actor_dies_and_the_engine_does_not_notice(stage: DaemonProcess) -> None:
    stage.load("quick")
    stage.wait_for("quick", "READY")
    rank = stage.pid_of("quick")
    (agent,) = [process["pid"] for process in stage.status()["costs"]["ray"] if process["name"].startswith("ray::Agent")]
    os.kill(agent, signal.SIGKILL)

    assert stage.chat("quick", "hello").status_code == 200
    until(lambda: _agents(stage) not in ([], [agent]), "Ray starts the agent again", 0.3)
    until(lambda: stage.status()["nodes"][0]["agent"], "it answers", 0.2)
    assert (stage.pid_of("quick"), stage.model("quick")["failures"]) == (rank, 0)


def test_the_raylet_dies_and_everything_recovers_around_the_living_engine(stage: DaemonProcess) -> None:
    stage.load("quick")
    stage.wait_for("quick", "READY")
    rank = stage.pid_of("quick")
    before = stage.ray_pids()
    (raylet,) = [process["pid"] for process in stage.status()["costs"]["ray"] if process["name"] == "raylet"]
    os.kill(raylet, signal.SIGKILL)

    assert stage.chat("quick", "hello").status_code == 200
    until(lambda: raylet not in stage.ray_pids() and stage.status()["nodes"][0]["agent"] and _connected(stage), "Ray is back", 0.3)
    assert (stage.pid_of("quick"), stage.model("quick")["failures"]) == (rank, 0)
    until(lambda: [pid for pid in before if alive(pid)] == [], "nothing of the old Ray is left")
    assert stage.status()["nodes"][0]["reserved_gib"] == 3
    stage.unload("quick")
    stage.wait_for("quick", "STOPPED")
    stage.load("quick")
    stage.wait_for("quick", "READY")  # Ray starts anew, which takes half a minute on a busy machine


def test_events_are_streamed(stage: DaemonProcess) -> None:
    kinds: list[str] = []
    with stage.client.stream("GET", "/admin/v1/events", headers={"accept": "text/event-stream"}) as stream:
        stage.load("quick")
        for line in stream.iter_lines():
            if line.startswith("data: "):
                event = json.loads(line[6:])
                kinds.append(event["kind"])
                if event["kind"] == "ready" and event["model"] == "quick":
                    break
    assert {"want", "state", "started", "ready"} <= set(kinds)


def test_the_log_of_an_engine_can_be_followed(stage: DaemonProcess) -> None:
    stage.load("quick")
    stage.wait_for("quick", "READY")
    page = stage.get("/admin/v1/models/quick/log")
    assert "Application startup complete" in page["text"]
    with stage.client.stream("GET", "/admin/v1/models/quick/log", params={"follow": "true"}) as stream:
        assert "Loading safetensors" in next(stream.iter_text())


def test_engine_metrics_pass_through_with_labels_and_a_hung_engine_does_not_delay_the_scrape(stage: DaemonProcess) -> None:
    stage.load("quick")
    stage.wait_for("quick", "READY")
    until(lambda: "vllm:num_requests_running" in stage.client.get("/metrics").text, "a scrape", 0.3)
    text = stage.client.get("/metrics").text
    assert 'model="quick",node="127.0.0.1"' in text
    assert text.count("# TYPE vllm:num_requests_running") == 1
    assert 'sparkd_model_state{model="quick",state="READY"} 1.0' in text

    engine = [pid for pid in _members(stage.pid_of("quick")) if pid != stage.pid_of("quick")]
    for pid in engine:
        os.kill(pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        assert stage.client.get("/metrics").status_code == 200
        assert stage.client.get("/livez").status_code == 200
        waited_s = time.monotonic() - started
    finally:
        for pid in engine:
            os.kill(pid, signal.SIGCONT)
    # Not a measurement: the engine answers nothing at all, so any waiting for it would take its whole timeout.
    assert waited_s < 1.9


def test_ray_listens_on_loopback_only_and_every_port_wants_the_token(stage: DaemonProcess) -> None:
    listeners = stage.status()["costs"]["ray_listeners"]

    assert listeners
    assert [where for where in listeners if "127.0.0.1:" not in where] == []
    assert not [where for where in listeners if where.split()[0].endswith((":8265", ":10001"))]
    # Two processes of Ray's dashboard are there with every head, as README.md says, and listen on nothing.
    dashboard = {"python", "ray::DashboardA"}
    assert dashboard <= {process["name"] for process in stage.status()["costs"]["ray"]}
    assert dashboard.isdisjoint(where.partition(" ")[2] for where in listeners)
    assert (stage.state_dir / "ray.token").stat().st_mode & 0o077 == 0


def test_secrets_and_prompts_are_nowhere(stage: DaemonProcess) -> None:
    canary = "xyzzy-canary-9431"
    stage.chat("quick", canary)
    stage.chat(canary, "x")
    stage.client.post("/v1/chat/completions", content=f'{{"model": "quick", {canary}', headers={"content-type": "application/json"})
    stage.client.get("/v1/models", headers={"authorization": f"Bearer {canary}"})
    stage.client.get(f"/nothing?key={canary}")
    written = [path for path in [stage.output, *stage.state_dir.rglob("*")] if path.is_file()]

    assert [path for path in written if canary.encode() in path.read_bytes()] == []
    assert canary not in stage.client.get("/metrics").text


def test_the_next_daemon_adopts_the_engine_of_one_that_was_killed_and_of_one_that_left_it(tmp_path: Path) -> None:
    """kill -9 first; then SIGTERM under systemd, which leaves engines and Ray; then Ctrl-C, which ends them."""
    made = DaemonProcess(tmp_path, settings(tmp_path, quick={"preload": True}))
    made.start()
    made.settled()
    made.wait_for("quick", "READY")
    rank = made.pid_of("quick")
    ray = made.ray_pids()
    made.kill()
    assert alive(rank)

    made.start("--leave-engines")
    answered = until(lambda: _answers(made, "quick"), "an answer")
    made.ray_connected()

    assert answered
    assert (made.pid_of("quick"), made.model("quick")["failures"]) == (rank, 0)
    assert sorted(made.ray_pids())[0] in ray
    kinds = [event["kind"] for event in made.get("/admin/v1/events?limit=1000")["events"]]
    assert (kinds.count("adopted"), kinds.count("started")) == (1, 1)
    until(lambda: made.status()["nodes"][0]["reserved_gib"] == 1, "its memory is reserved again")
    assert made.end(signal.SIGTERM) == 0
    assert alive(rank)

    made.start()
    made.settled()
    made.wait_for("quick", "READY")
    assert made.pid_of("quick") == rank
    made.gone()

    assert made.process is not None
    assert made.process.returncode == 0
    assert not list(made.runtime_dir.rglob("*.sock"))


def test_ctrl_c_lets_requests_finish_and_waits_for_nothing_else(tmp_path: Path) -> None:
    env = {"SPARKD_STUB_TOKENS": "80", "SPARKD_STUB_CHUNK_INTERVAL_S": "0.1"}
    with daemon(tmp_path, settings(tmp_path, quick={"preload": True, "env": env})) as made, ThreadPoolExecutor(2) as pool:
        made.wait_for("quick", "READY")
        # It would go on for ever.
        begun = threading.Event()
        watching = pool.submit(_read_to_its_end, made, "GET", "/admin/v1/events", {"accept": "text/event-stream"}, None, begun)
        assert begun.wait(30)
        asked = pool.submit(_read_to_its_end, made, "POST", "/v1/chat/completions", {}, _chat(stream=True))
        until(lambda: made.model("quick").get("in_flight") == 1, "the stream runs")
        began_s = time.monotonic()
        assert made.end(signal.SIGINT, 50) == 0
        assert asked.result(1).endswith("data: [DONE]\n\n")
        assert 5 < time.monotonic() - began_s < 40, "the whole stream, and not unload_timeout_s"
        watching.result(1)
        assert lacking(made.tail(), "1 request", "60 s") == []


def test_a_second_ctrl_c_ends_everything_at_once(tmp_path: Path) -> None:
    env = {"SPARKD_STUB_TOKENS": "3000", "SPARKD_STUB_CHUNK_INTERVAL_S": "0.1", "SPARKD_STUB_IGNORE_SIGTERM": "1"}
    given = settings(tmp_path, quick={"preload": True, "env": env})
    given["engine"]["stop_timeout_s"] = 45
    with daemon(tmp_path, given) as made, ThreadPoolExecutor(1) as pool:
        made.wait_for("quick", "READY")
        asked = pool.submit(_read_to_its_end, made, "POST", "/v1/chat/completions", {}, _chat(stream=True))
        until(lambda: made.model("quick").get("in_flight") == 1, "the stream runs")
        assert made.process is not None
        made.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            made.process.wait(4)
        assert not asked.done()
        assert made.end(signal.SIGINT, 30) == 0, "neither the stream nor the engine's own time was waited for"
        assert "shutting down" in asked.result(1), "the stream ends with the reason"


def _chat(**fields: Any) -> dict[str, Any]:
    return {"model": "quick", "messages": [{"role": "user", "content": "x"}], **fields}


def _read_to_its_end(
    made: DaemonProcess, method: str, path: str, headers: dict[str, str], body: dict[str, Any] | None, begun: threading.Event | None = None
) -> str:
    """Or until it is cut. begun: is set once the answer has begun."""
    text, cut = "", contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError)
    with cut, httpx.stream(method, f"{made.url}{path}", headers=headers, json=body, timeout=90, trust_env=False) as response:
        if begun is not None:
            begun.set()
        for piece in response.iter_text():
            text += piece
    return text


KEYS = {"inference": ["user-key-0123456789"], "admin": ["admin-key-0123456789"]}
USER = {"authorization": "Bearer user-key-0123456789"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, dict[str, Any]]]:
    """A daemon with keys, whose client has the admin's, and its settings."""
    folder = tmp_path_factory.mktemp("guarded")
    slow = {"SPARKD_STUB_TOKENS": "60", "SPARKD_STUB_CHUNK_INTERVAL_S": "0.05"}
    given = settings(folder, quick={"preload": True, "env": slow}) | {"keys": KEYS}
    with daemon(folder, given) as made:
        made.client.headers["authorization"] = "Bearer admin-key-0123456789"
        made.wait_for("quick", "READY")
        yield made, given


def test_keys_are_needed_where_they_are_set_and_the_probe_passes_all_the_same(guarded: tuple[DaemonProcess, dict[str, Any]]) -> None:
    made, _ = guarded
    assert httpx.get(f"{made.url}/v1/models", trust_env=False).status_code == 401
    assert httpx.get(f"{made.url}/v1/models", headers=USER, trust_env=False).status_code == 200
    assert httpx.get(f"{made.url}/admin/v1/models", headers=USER, trust_env=False).status_code in (401, 403)


def test_a_second_daemon_on_the_same_state_is_refused(guarded: tuple[DaemonProcess, dict[str, Any]], tmp_path: Path) -> None:
    made, _ = guarded
    second = DaemonProcess(tmp_path, {})
    second.state_dir = made.state_dir
    second.configure({})
    second.start()

    assert second.process is not None
    assert second.process.wait(30) == 3
    second.client.close()
    assert f"process {made.process.pid}" in second.tail()  # type: ignore[union-attr]


def test_a_reload_takes_a_good_file_and_refuses_a_bad_one_while_streams_go_on(
    guarded: tuple[DaemonProcess, dict[str, Any]], tmp_path: Path
) -> None:
    made, given = guarded
    rank = made.pid_of("quick")
    chunks: list[str] = []

    def read() -> None:
        body = {"model": "quick", "stream": True, "messages": [{"role": "user", "content": "x"}]}
        with httpx.stream("POST", f"{made.url}/v1/chat/completions", json=body, headers=USER, timeout=30, trust_env=False) as stream:
            chunks.extend(stream.iter_lines())

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: len(chunks) > 3, "the stream has begun")
    given["models"]["second"] = model(tmp_path / "model")
    made.configure(given)
    made.process.send_signal(signal.SIGHUP)  # type: ignore[union-attr]
    until(lambda: made.model("second").get("state"), "the new model is known")
    made.config.write_text("modles: {}\n")
    made.process.send_signal(signal.SIGHUP)  # type: ignore[union-attr]
    until(lambda: "modles" in made.tail(), "the refusal is logged")
    quick = given["models"]["quick"]
    file = tmp_path / "weights.gguf"
    file.touch()
    given["models"]["quick"] = quick | {"model": str(file)}
    made.configure(given)
    made.process.send_signal(signal.SIGHUP)  # type: ignore[union-attr]
    until(lambda: "models.quick.model" in made.tail(), "its new entry is refused")
    given["models"]["quick"] = quick
    made.configure(given)
    reader.join(20)

    assert "data: [DONE]" in chunks
    assert made.pid_of("quick") == rank
    assert {found["name"] for found in made.get("/admin/v1/models")["models"]} == {"quick", "second"}


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"listen": "0.0.0.0:0"}, 2, "no key"),
        ({"modles": {}}, 2, "models"),
        ({"listen": "127.0.0.1:1"}, 2, "127.0.0.1:1"),
    ],
    ids=["open to the network without a key", "unknown key", "no right to bind"],
)
def test_what_is_wrong_is_said_in_one_sentence_before_anything_starts(
    tmp_path: Path, change: dict[str, Any], code: int, words: str
) -> None:
    if "127.0.0.1:1" in change.values() and os.geteuid() == 0:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            change = {"listen": f"127.0.0.1:{other.getsockname()[1]}"}
            _refused(tmp_path, change, code, "another program listens there")
        return
    _refused(tmp_path, change, code, words)


def _refused(folder: Path, change: dict[str, Any], code: int, words: str) -> None:
    made = DaemonProcess(folder, {})
    made.configure({})
    made.config.write_text(yaml.safe_dump(yaml.safe_load(made.config.read_text()) | change))
    made.start()
    assert made.process is not None
    assert made.process.wait(30) == code
    made.client.close()
    assert words in made.tail()
    assert "Traceback" not in made.tail()
    assert not made.runtime_dir.exists()


def _session(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3])
    except OSError:
        return -1


def _members(shim: int) -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _session(int(entry.name)) == shim]


def _killable(stage: DaemonProcess, name: str, state: str) -> int:
    """The shim of a rank that is in `state`, 0 while it is not."""
    seen = stage.model(name)
    if not seen["ranks"]:
        return 0
    if state == "SIZING":
        served = (seen["progress"] or {}).get("server_up")
        return int(seen["ranks"][0]["pid"]) if served and seen["state"] != "READY" else 0
    return int(seen["ranks"][0]["pid"]) if seen["state"] == state else 0


def _agents(stage: DaemonProcess) -> list[int]:
    return [process["pid"] for process in stage.status().get("costs", {}).get("ray", []) if process["name"].startswith("ray::Agent")]


def _connected(stage: DaemonProcess) -> bool:
    return bool(stage.status()["cluster"]["connected"])


def _answers(stage: DaemonProcess, name: str) -> bool:
    try:
        return stage.chat(name, "hello").status_code == 200
    except httpx.HTTPError:
        return False
