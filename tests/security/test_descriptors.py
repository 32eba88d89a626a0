"""The whole daemon, with Ray and the stub engine, at 256 open files: 400 clients end nothing."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.sparkd.gateway.fakes import post, request
from tests.stub import stub_engine
from tests.support.daemon_process import DaemonProcess
from tests.support.waiting import HUNG_S, until

LIMIT, CLIENTS = 256, 400
STREAM = b'{"model":"m","messages":[{"role":"user","content":"x"}],"stream":true}'


class FewFiles(DaemonProcess):
    def start(self, *arguments: str) -> None:
        self._launch(("sh", "-c", f'ulimit -n {LIMIT} && exec "$@"', "sh"), arguments)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("files")
    (folder / "model").mkdir()
    (folder / "gate").touch()
    model = {"model": str(folder / "model"), "memory_gib": 1, "preload": True, "env": {"SPARKD_STUB_GATE": str(folder / "gate")}}
    made = FewFiles(folder, {"engine": stub_engine() | {"stop_timeout_s": 2}, "models": {"m": model}})
    made.start()
    try:
        made.settled()
        made.wait_for("m", "READY")
        yield made
    finally:
        made.gone()


@contextlib.contextmanager
def clients(made: DaemonProcess, sends: bytes) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        for _ in range(CLIENTS):
            client = held.enter_context(socket.create_connection(("127.0.0.1", made.port), timeout=HUNG_S))
            with contextlib.suppress(OSError):  # some are refused
                client.sendall(sends)
        yield


def is_answered(made: DaemonProcess, path: str) -> bool:
    """A new connection takes the place of an idle one. Where none is idle yet, it is answered 503 or reset, and may try again."""
    with httpx.Client(base_url=made.url, timeout=HUNG_S, trust_env=False) as client, contextlib.suppress(httpx.TransportError):
        return client.get(path).status_code == 200
    return False


def call_anew(made: DaemonProcess) -> None:
    """The connection that it had was idle, so it was closed for a new one."""
    made.client.close()
    made.client = httpx.Client(base_url=made.url, timeout=HUNG_S, trust_env=False)


def test_400_idle_clients_keep_nobody_from_an_answer(made: DaemonProcess) -> None:
    with clients(made, b""):
        until(lambda: is_answered(made, "/livez"), "the probe of life")
        call_anew(made)
        assert made.chat("m", "x", max_tokens=1).status_code == 200
        status = made.status()
        assert status["cluster"]["connected"]
        assert any("ConnectionsFull" in str(condition) for condition in status["conditions"])
        assert made.metric("sparkd_connections_max") <= LIMIT / 2


@pytest.mark.parametrize(
    "sends",
    [
        post("/v1/chat/completions", STREAM),
        pytest.param(request("GET", "/admin/v1/events", "Accept: text/event-stream"), marks=pytest.mark.rest),
    ],
)
def test_400_clients_with_requests_leave_the_daemon_its_probes_and_ray(made: DaemonProcess, sends: bytes) -> None:
    gate = made.folder / "gate"
    gate.unlink()
    try:
        with clients(made, sends):
            until(lambda: is_answered(made, "/livez"), "the probe of life")
            until(lambda: is_answered(made, "/metrics"), "the metrics")
    finally:
        gate.touch()
    call_anew(made)
    until(lambda: made.chat("m", "x", max_tokens=1).status_code == 200, "an answer")
    assert made.status()["cluster"]["connected"]
    assert made.model("m")["failures"] == 0
