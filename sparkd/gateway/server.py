"""uvicorn, set up for the data plane: given sockets, bounded connections, no words of its own. Never installs a signal handler."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import uvicorn

from sparkd.gateway.answers import App
from sparkd.gateway.limits import Limits
from sparkd.gateway.protocol import bounded_protocol

BACKLOG = 2048
# mallopt(3). glibc raises its own threshold to the largest block ever freed; from then on bodies grow on the heap by being copied.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAPPED_FROM_BYTES = 1 << 20
_TRIMMED_FROM_BYTES = 4 << 20


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


def map_large_blocks() -> None:
    """Has this process's malloc map each block of 1 MiB and more by itself, for good: it grows without a copy and goes back when freed.

    A body that arrives in pieces then costs its own size; on the heap it costs up to three times that, which stays. Does nothing where
    the C library has no mallopt (musl maps large blocks anyway).
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIMMED_FROM_BYTES)


def gateway_server(app: App, limits: Limits, *, drain_s: float = 30.0) -> GatewayServer:
    """A server for `app`, not yet listening. Runs on whatever loop `serve` is awaited on; the daemon chooses uvloop where it can.

    Sets how this process's malloc keeps large blocks (map_large_blocks).
    """
    map_large_blocks()
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
