"""uvicorn, set up for the data plane: given sockets, bounded connections, no words of its own, no signal handler."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import time
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from sparkd import metrics
from sparkd.errors import ConfigError
from sparkd.execution.boundary import Boundary
from sparkd.gateway.client_connection import ClientConnection
from sparkd.gateway.limits import ClientLimits, descriptor_limit

BACKLOG = 2048
REST_S, CUT_S = 2.0, 1.0
LOOK_EVERY_S = 0.1
# mallopt(3). glibc raises its own threshold to the largest block ever freed; from then on bodies grow on the heap by being copied.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAPPED_FROM_BYTES = 1 << 20
_TRIMMED_FROM_BYTES = 4 << 20


class GatewayServer(uvicorn.Server):
    """`await serve(sockets=[...])` runs until `should_exit` is set; then open requests have `drain_s` seconds to finish.

    The sockets are bound by the caller (or inherited from systemd) and closed here at the end. Signals are the daemon's.
    """

    def __init__(self, config: uvicorn.Config, boundary: Boundary, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(config)
        self._boundary = boundary
        self._clock = clock
        self._ticked_at_s = clock()
        self.servers: list[asyncio.Server] = []
        self.set_limits(config.http.limits)

    async def run_until_told(self, sockets: list[socket.socket]) -> None:
        """Run `serve` until the daemon stops it; start it again where it ends by an error before that."""

        async def serve() -> None:
            if not self.should_exit:
                await self.serve(sockets)

        await self._boundary.keep("gateway", serve)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on copies of `sockets`: the loop closes what it gets, and a server that begins again needs its own."""
        self._close_servers()
        await super().startup(sockets=[listening.dup() for listening in sockets or ()])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, and let the connections that were just accepted open: uvicorn asks only open ones to end."""
        self._close_servers()
        await asyncio.sleep(LOOK_EVERY_S)
        await super().shutdown(sockets=sockets)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second by uvicorn while the server accepts connections."""
        is_over: bool = await super().on_tick(counter)
        self._ticked_at_s = self._clock()
        return is_over

    @property
    def tick_age_s(self) -> float:
        """Seconds since uvicorn's last tick, which it makes only while it accepts connections. 0 once the daemon stops the server."""
        return 0.0 if self.should_exit else self._clock() - self._ticked_at_s

    async def finish(self, serving: asyncio.Task[None], at_once: asyncio.Event, running: Callable[[], int] | None = None) -> None:
        """Take no more, and return once `serving`, the task of `serve`, has ended: when all that is open was answered, after drain_s, or
        soon after `at_once` was set. Then what is open is cut.

        running: how many requests the engines work on. Once there is none, what else is open (a log that is followed, a connection that
        says nothing) has REST_S; without `running` it has drain_s, too.
        """
        self.should_exit = True
        busy_at_s = self._clock()
        while not serving.done():
            if running is None or running():
                busy_at_s = self._clock()
            if at_once.is_set() or self._clock() - busy_at_s >= REST_S:
                await self._cut()
                break
            await asyncio.wait((serving,), timeout=LOOK_EVERY_S)
        await serving

    def _close_servers(self) -> None:
        for server in self.servers:
            server.close()

    async def _cut(self) -> None:
        """uvicorn's force_exit alone leaves tasks and connections open, and since Python 3.12 it waits for those."""
        self.force_exit = True
        tasks = set(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CUT_S)
            await asyncio.sleep(LOOK_EVERY_S)  # what they said last is sent
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def set_limits(self, limits: ClientLimits) -> None:
        """For a reload: open connections follow from their next deadline on."""
        self.config.http.limits = limits
        metrics.CONNECTIONS_MAX.set(limits.connections)
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


def gateway_server(
    app: ASGIApp,
    http: type[ClientConnection],
    *,
    drain_s: float = 30.0,
    boundary: Boundary | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> GatewayServer:
    """A server for `app`, not yet listening. http: see client_connection.

    Runs on whatever loop `serve` is awaited on; the daemon chooses uvloop where it can.

    Sets how this process's malloc keeps large blocks (map_large_blocks).
    """
    map_large_blocks()
    config = uvicorn.Config(
        app,
        http=http,
        ws="none",
        loop="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        # The loop accepts them all before it lets the first one be closed.
        backlog=min(BACKLOG, descriptor_limit() // 4),
        timeout_keep_alive=http.limits.keep_alive_s,
        timeout_graceful_shutdown=drain_s,
    )
    return GatewayServer(config, boundary or Boundary(clock), clock)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ConfigError where another has the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        # With the interface's number for a link-local address, which bind() does not take from the text.
        listening.bind(socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4])
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        reason = "another program listens there" if error.errno == 98 else (error.strerror or str(error))
        raise ConfigError(f"listen: {host}:{port} cannot be bound: {reason}. Choose another port with --listen HOST:PORT.") from None
    listening.setblocking(False)
    return listening
