"""A daemon under systemd's socket activation is killed, restarted and reloaded: engines live on, no client is refused, no stream breaks."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.stub import stub_engine
from tests.support.activated import ActivatedDaemon
from tests.support.daemon_process import alive
from tests.support.stage import stored
from tests.support.stream import Stream, held
from tests.support.waiting import HUNG_S, until

CHAT = "/v1/chat/completions"


@contextmanager
def activated(folder: Path, **models: dict[str, Any]) -> Iterator[tuple[ActivatedDaemon, dict[str, Any]]]:
    """Its models are READY, and it waits as long for requests and engines as they take."""
    (folder / "model").mkdir()
    given: dict[str, Any] = {
        "engine": stub_engine() | {"stop_timeout_s": HUNG_S},
        "unload_timeout_s": HUNG_S,
        "models": {name: {"model": str(folder / "model"), "memory_gib": 1, "preload": True} | keys for name, keys in models.items()},
    }
    made = ActivatedDaemon(folder, given)
    made.start()
    try:
        made.settled()
        made.ray_connected()
        for name in models:
            made.wait_for(name, "READY")
        yield made, given
    finally:
        made.gone()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ActivatedDaemon, dict[str, Any]]]:
    """Shared: each test leaves it with its own configuration and both models READY."""
    with activated(tmp_path_factory.mktemp("activated"), quick={}, slow={}) as made:
        yield made


def ask(made: ActivatedDaemon, model: str, *, stream: bool = False, request_id: str = "") -> str:
    """A connection of its own, as most clients' first request; the whole answer."""
    body = {"model": model, "stream": stream, "messages": [{"role": "user", "content": "x"}]}
    headers = {"x-request-id": request_id} if request_id else {}
    response = httpx.post(f"{made.url}{CHAT}", json=body, headers=headers, timeout=HUNG_S, trust_env=False)
    assert response.status_code == 200, response.text
    return response.text


def recorded(made: ActivatedDaemon, request_id: str) -> dict[str, Any]:
    """The row of a finished request; empty where there is none."""
    rows = (made.get("/admin/v1/requests?state=finished&limit=1000") or {"finished": []})["finished"]
    return next((dict(row) for row in rows if row["request_id"] == request_id), {})


def streams(made: ActivatedDaemon, model: str, gate: Path, count: int) -> list[Stream]:
    """So many at once, each in the middle of its answer until there is a gate."""
    return [Stream(made.url, model, **held(gate)).start() for _ in range(count)]


def watch_events(made: ActivatedDaemon, begun: threading.Event) -> None:
    """Until the daemon ends: by itself the stream of events goes on for ever."""
    sse = {"accept": "text/event-stream"}
    with suppress(httpx.TransportError), httpx.stream("GET", f"{made.url}/admin/v1/events", headers=sse, timeout=HUNG_S) as events:
        begun.set()
        for _ in events.iter_raw():
            continue


def begins_to_end(made: ActivatedDaemon, before: int) -> None:
    """before: what it had told by then."""
    until(lambda: any("STOPPING=1" in said for said in made.told[before:]), "its end has begun", 0.01)


def test_engines_and_streams_outlive_their_daemon_until_ctrl_c_ends_all(tmp_path: Path) -> None:
    """Killed with SIGKILL first; then restarted with SIGTERM, as systemd does; then ended with Ctrl-C."""
    with activated(tmp_path, quick={}) as (made, _), ThreadPoolExecutor(8) as pool:
        rank, ray = made.pid_of("quick"), made.ray_pids()
        ask(made, "quick", request_id="before")
        until(lambda: "before" in stored(made), "its record is on disk")
        before = recorded(made, "before")

        lost = streams(made, "quick", tmp_path / "never", 1)[0]
        made.kill()
        assert not lost.whole() and alive(rank)
        made.start()
        ask(made, "quick", request_id="after")
        made.ray_connected()
        made.wait_for("quick", "READY")
        assert (made.pid_of("quick"), made.model("quick")["failures"]) == (rank, 0)
        assert sorted(made.ray_pids())[0] in ray
        kinds = [event["kind"] for event in made.get("/admin/v1/events?limit=1000")["events"]]
        assert (kinds.count("adopted"), kinds.count("started")) == (1, 1)
        until(lambda: made.status()["nodes"][0]["reserved_gib"] == 1, "its memory is reserved again")
        assert recorded(made, "before") == before
        assert until(lambda: recorded(made, "after"), "its record")["number"] > before["number"]

        kept, told, over = streams(made, "quick", tmp_path / "restart", 4), len(made.told), threading.Event()

        def keep_asking() -> int:
            count = 0
            while not over.is_set():
                count += bool(ask(made, "quick", stream=count % 2 == 0))
            return count

        askers = [pool.submit(keep_asking) for _ in range(4)]
        restarted = pool.submit(made.restart)
        begins_to_end(made, told)
        (tmp_path / "restart").touch()
        restarted.result()
        assert [stream.whole() for stream in kept] == [True] * 4
        made.settled()
        until(lambda: made.metric("sparkd_requests_total", 'model="quick"') > 4, "requests come in again")
        over.set()
        assert all(one.result() for one in askers), "none was refused"
        made.wait_for("quick", "READY")
        assert made.pid_of("quick") == rank

        last, told = streams(made, "quick", tmp_path / "end", 1)[0], len(made.told)
        watches = threading.Event()
        watching = pool.submit(watch_events, made, watches)
        assert watches.wait(HUNG_S)
        assert made.process is not None
        made.process.send_signal(signal.SIGINT)
        begins_to_end(made, told)
        assert made.process.poll() is None and not last.ended.is_set(), "it waits for the stream"
        (tmp_path / "end").touch()
        assert made.process.wait() == 0 and last.whole()
        watching.result()
        assert not alive(rank)
        assert not list(made.runtime_dir.rglob("*.sock"))


@pytest.mark.rest
def test_a_second_ctrl_c_ends_everything_at_once(tmp_path: Path) -> None:
    """Neither the stream nor the engine's own time, which are endless, is waited for."""
    with activated(tmp_path, quick={"env": {"SPARKD_STUB_IGNORE_SIGTERM": "1"}}) as (made, _):
        (stream,), told = streams(made, "quick", tmp_path / "never", 1), len(made.told)
        assert made.process is not None
        made.process.send_signal(signal.SIGINT)
        begins_to_end(made, told)
        assert made.process.poll() is None and not stream.ended.is_set()
        assert made.end(signal.SIGINT) == 0
        assert '"error"' in stream.end(), "it ends with the reason"


@pytest.mark.rest
def test_a_client_that_has_just_connected_when_it_ends_is_answered(daemon: tuple[ActivatedDaemon, dict[str, Any]]) -> None:
    made, _ = daemon
    body = b'{"model": "quick", "messages": []}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"content-length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", made.port)) as early, ThreadPoolExecutor(1) as pool:
        assert made.get("/livez")
        before = len(made.told)
        restarted = pool.submit(made.restart)
        begins_to_end(made, before)
        early.sendall(head + body)
        assert early.recv(4096).startswith(b"HTTP/1.1 200 ")
        restarted.result()
    made.settled()


@pytest.mark.rest
def test_an_engine_whose_settings_changed_is_restarted_once_its_streams_are_over(
    daemon: tuple[ActivatedDaemon, dict[str, Any]], tmp_path: Path
) -> None:
    made, given = daemon
    before, other = made.pid_of("slow"), made.pid_of("quick")
    kept = streams(made, "slow", tmp_path / "gate", 4)
    changes = {"quick": {"ttl": 700}, "slow": {"max_model_len": 77}}
    made.configure(given | {"models": {name: entry | changes[name] for name, entry in given["models"].items()}})
    told = made.client.post("/admin/v1/reload").json()
    assert (told["restarted"], told["adjusted"]) == (["slow"], ["quick"])
    until(lambda: made.model("slow")["state"] == "DRAINING", "it ends its streams")
    assert made.pid_of("slow") == before
    (tmp_path / "gate").touch()
    assert [stream.whole() for stream in kept] == [True] * 4
    until(lambda: made.model("slow")["state"] == "READY" and made.pid_of("slow") != before, "it is restarted")
    assert ask(made, "slow")
    assert made.pid_of("quick") == other
    made.configure(given)
    made.client.post("/admin/v1/reload").raise_for_status()
    until(lambda: made.model("slow")["state"] == "READY" and made.model("slow")["want"] == "RUNNING", "as it was")
