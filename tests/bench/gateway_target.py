"""The gateway alone, as the daemon serves it, in front of one engine's socket. Never starts an engine, a supervisor or Ray.

Started by tests.bench.gateway with --stub-socket, --port and --model.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from sparkd.engine.upstream import Upstream
from sparkd.errors import UnknownModel, UnknownRoute
from sparkd.gateway import ClientLimits, Edge, EdgeSettings, gateway_server
from sparkd.gateway.request_log import RequestLog
from sparkd.gateway.responses import Receive, Scope, Send
from sparkd.state.request_store import RequestStore
from sparkd.state.snapshot import Snapshot


class OneLease:
    """A right that everybody has."""

    def __init__(self, model: str, upstream: Upstream) -> None:
        self.model = model
        self.upstream = upstream
        self.parsers = None

    async def __aenter__(self) -> OneLease:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None


class OneModel:
    """A supervisor whose only model is always ready."""

    def __init__(self, model: str, upstream: Upstream) -> None:
        self._lease = OneLease(model, upstream)

    def lease(self, name: str, **_: object) -> OneLease:
        if name != self._lease.model:
            raise UnknownModel(name, [self._lease.model])
        return self._lease

    def snapshot(self) -> Snapshot:
        return Snapshot(at_s=time.time(), settled=True, draining=False, tick_age_s=0.0, models={}, nodes=(), operations={})


async def serve(stub_socket: str, port: int, model: str) -> None:
    upstream = Upstream(socket_path=stub_socket)
    limits = ClientLimits()

    def well() -> tuple[bool, dict[str, Any]]:
        return True, {}

    requests = RequestLog(RequestStore(Path(stub_socket).with_name("requests.db")))
    settings = EdgeSettings(limits=limits)
    edge = Edge(OneModel(model, upstream), admin=_no_admin, live=well, ready=well, settings=settings, requests=requests)
    server = gateway_server(edge, limits, drain_s=0.0)

    def stop() -> None:
        server.should_exit = True

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    try:
        async with asyncio.TaskGroup() as tasks:
            recording = tasks.create_task(requests.run())
            await server.serve(sockets=[listener])
            recording.cancel()
    finally:
        await requests.close()
        await upstream.close()


async def _no_admin(scope: Scope, receive: Receive, send: Send) -> None:
    raise UnknownRoute("There is no admin API here.")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gateway_target")
    parser.add_argument("--stub-socket", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="stub")
    options = parser.parse_args()
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = asyncio.new_event_loop  # type: ignore[assignment]
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve(options.stub_socket, options.port, options.model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
