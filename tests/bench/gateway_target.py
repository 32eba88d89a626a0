"""The gateway alone, as the daemon serves it, in front of one engine's socket. Never starts an engine, a supervisor or Ray.

Started by tests.bench.gateway and by the test of its memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import uvloop
from starlette.types import Receive, Scope, Send

from sparkd.errors import UnknownModel, UnknownRoute
from sparkd.gateway.client_connection import client_connection
from sparkd.gateway.edge import Edge
from sparkd.gateway.limits import ClientLimits
from sparkd.gateway.request_log import RequestLog
from sparkd.gateway.server import gateway_server
from sparkd.gateway.upstream import Upstream
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


async def no_admin(scope: Scope, receive: Receive, send: Send) -> None:
    raise UnknownRoute("There is no admin API here.")


def well() -> tuple[bool, dict[str, Any]]:
    return True, {}


async def serve(asked: argparse.Namespace) -> None:
    limits = ClientLimits(**asked.limits)
    requests = RequestLog(RequestStore(Path(asked.stub_socket).with_name("state.db")))
    supervisor = OneModel(asked.model, Upstream(socket_path=asked.stub_socket))
    edge = Edge(supervisor, admin=no_admin, live=well, ready=well, requests=requests)
    server = gateway_server(edge, client_connection(limits), drain_s=0.0)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(requests.run())
        tasks.create_task(server.run_until_told([socket.create_server(("127.0.0.1", asked.port))]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gateway_target")
    parser.add_argument("--port", type=int, required=True)
    for name in ("stub-socket", "model"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--limits", type=json.loads, default={}, help="fields of ClientLimits, as JSON")
    asked = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(asked))


if __name__ == "__main__":
    main()
