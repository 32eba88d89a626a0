"""A daemon under systemd's socket activation is restarted and reloaded under load: nobody is refused, and no stream breaks."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.activated import ActivatedDaemon
from tests.support.waiting import until

# A stream of a stub lasts about 4 s.
SLOW = {"SPARKD_STUB_TOKENS": "80", "SPARKD_STUB_CHUNK_INTERVAL_S": "0.05"}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ActivatedDaemon, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("activated")
    (folder / "model").mkdir()
    model = {"model": str(folder / "model"), "memory_gib": 1}
    given: dict[str, Any] = {
        "engine": {"entrypoint": "workers.stub", "stop_timeout_s": 2},
        "models": {"quick": model | {"preload": True}, "slow": model | {"preload": True, "env": SLOW}},
    }
    made = ActivatedDaemon(folder, given)
    made.start()
    try:
        made.settled()
        for name in given["models"]:
            made.wait_for(name, "READY")
        yield made, given
    finally:
        made.gone()


def ask(made: ActivatedDaemon, model: str, *, stream: bool) -> str:
    """A connection of its own, as most clients' first request; the whole answer."""
    body = {"model": model, "stream": stream, "messages": [{"role": "user", "content": "x"}]}
    response = httpx.post(f"{made.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    return response.text


class Streams:
    """So many at once, each read to its end by a thread of its own."""

    def __init__(self, made: ActivatedDaemon, count: int) -> None:
        self._pool = ThreadPoolExecutor(count)
        self._asked = [self._pool.submit(ask, made, "slow", stream=True) for _ in range(count)]
        until(lambda: made.model("slow").get("in_flight") == count, "all streams run")

    def whole(self) -> int:
        """How many came to their end."""
        with self._pool:
            return sum(one.result().endswith("data: [DONE]\n\n") for one in self._asked)


def test_a_restart_refuses_nobody_and_breaks_no_stream(daemon: tuple[ActivatedDaemon, dict[str, Any]]) -> None:
    made, _ = daemon
    ranks = [made.pid_of("quick"), made.pid_of("slow")]
    streams, over = Streams(made, 8), threading.Event()

    def keep_asking() -> int:
        asked = 0
        while not over.is_set():
            ask(made, "quick", stream=asked % 2 == 0)
            asked += 1
        return asked

    with ThreadPoolExecutor(6) as pool:
        askers = [pool.submit(keep_asking) for _ in range(6)]
        until(lambda: made.metric("sparkd_requests_total", 'model="quick"') > 60, "requests come in")
        made.restart()
        made.settled()
        until(lambda: made.metric("sparkd_requests_total", 'model="quick"') > 60, "requests come in again")
        over.set()
        assert all(one.result() > 5 for one in askers)
    assert streams.whole() == 8
    assert [made.pid_of("quick"), made.pid_of("slow")] == ranks


def test_who_has_just_connected_when_it_ends_is_answered(daemon: tuple[ActivatedDaemon, dict[str, Any]]) -> None:
    made, _ = daemon
    body = b'{"model": "quick", "messages": []}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"content-length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", made.port)) as early, ThreadPoolExecutor(1) as pool:
        assert made.get("/livez")
        before = len(made.told)
        restarted = pool.submit(made.restart)
        until(lambda: any("STOPPING=1" in said for said in made.told[before:]), "its end has begun", 0.01)
        early.sendall(head + body)
        early.settimeout(30)
        assert early.recv(4096).startswith(b"HTTP/1.1 200 ")
        restarted.result()
    made.settled()


def test_fifty_reloads_break_no_stream_and_touch_no_engine(daemon: tuple[ActivatedDaemon, dict[str, Any]]) -> None:
    made, given = daemon
    made.wait_for("slow", "READY")
    ranks = [made.pid_of("quick"), made.pid_of("slow")]
    streams = Streams(made, 32)
    for number in range(50):
        made.configure(given | {"global_ttl_s": 1000 + number} if number % 5 else {"modles": number})
        if number % 2:
            made.process.send_signal(signal.SIGHUP)  # type: ignore[union-attr]
        else:
            assert made.client.post("/admin/v1/reload").status_code == (200 if number % 5 else 422)
    assert streams.whole() == 32
    made.configure(given)
    assert made.client.post("/admin/v1/reload").json()["restarted"] == []
    assert [made.pid_of("quick"), made.pid_of("slow")] == ranks
    assert made.status()["conditions"] == []


def test_an_engine_whose_settings_changed_is_restarted_once_its_streams_are_over(daemon: tuple[ActivatedDaemon, dict[str, Any]]) -> None:
    made, given = daemon
    made.wait_for("slow", "READY")
    before, other = made.pid_of("slow"), made.pid_of("quick")
    streams = Streams(made, 4)
    given["models"]["quick"] = given["models"]["quick"] | {"ttl": 700}
    given["models"]["slow"] = given["models"]["slow"] | {"max_model_len": 77}
    made.configure(given)
    told = made.client.post("/admin/v1/reload").json()
    assert (told["restarted"], told["adjusted"]) == (["slow"], ["quick"])
    assert ask(made, "slow", stream=False)
    assert streams.whole() == 4
    # The question may have come before the supervisor's next look, and then the old engine answered it.
    until(lambda: made.model("slow")["state"] == "READY" and made.pid_of("slow") != before, "it is restarted")
    assert made.pid_of("quick") == other
