"""uvicorn, set up for the data plane: given sockets, bounded connections, no words of its own. Never installs a signal handler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn

from sparkd.gateway.answers import App
from sparkd.gateway.limits import Limits
from sparkd.gateway.protocol import bounded_protocol

BACKLOG = 2048


class GatewayServer(uvicorn.Server):
    """`await serve(sockets=[...])` runs until `should_exit` is set; then open requests have `drain_s` seconds to finish.

    The sockets are bound by the caller (or inherited from systemd) and closed here at the end. Signals are the daemon's.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def set_limits(self, limits: Limits) -> None:
        """For a reload: open connections follow from their next deadline on."""
        self.config.http.limits = limits
        self.config.timeout_keep_alive = limits.keep_alive_s


def gateway_server(app: App, limits: Limits, *, drain_s: float = 30.0) -> GatewayServer:
    """A server for `app`, not yet listening. Runs on whatever loop `serve` is awaited on; the daemon chooses uvloop where it can."""
    config = uvicorn.Config(
        app,
        http=bounded_protocol(limits),
        ws="none",
        loop="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=limits.keep_alive_s,
        timeout_graceful_shutdown=drain_s,
    )
    return GatewayServer(config)
