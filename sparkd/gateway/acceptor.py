"""Takes in clients' connections while this process has file descriptors to spare. Never reads a request."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
from collections.abc import Callable, Collection, Iterable, MutableMapping
from contextlib import suppress
from typing import Protocol

from sparkd import metrics
from sparkd.condition import Condition
from sparkd.errors import Unavailable
from sparkd.execution.boundary import Boundary
from sparkd.gateway.exchange import count_refused
from sparkd.gateway.responses import date, error_bytes, new_request_id

log = logging.getLogger("sparkd.gateway")

BACKLOG = 2048
# Between two looks for clients: none of the others waits for longer than these take (about 1 ms).
AT_ONCE = 16
REST_S = 0.25
# How long a condition stays after the last connection that it is about.
TOLD_S = 15.0
# The daemon with Ray, its store and one engine has 55 (measured); threads of Ray, agents, probes, scrapes and log files want more.
_RESERVED, _RESERVED_SHARE, _RESERVED_AT_MOST = 96, 16, 1024
_FEWEST = 8
_SPARE_SHARE, _SPARE_AT_MOST = 16, 32
# accept(2): no descriptor or no memory for one more. Its other errors are about the one connection that is gone already.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_READ_BYTES = 64 * 1024


class Idle(Protocol):
    """A connection without a request."""

    def give_way(self) -> None: ...


def descriptor_limit() -> int:
    """RLIMIT_NOFILE of this process, the soft one: what open(2) goes by."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if limit != resource.RLIM_INFINITY else 1 << 30


def reserve(limit: int) -> int:
    """The descriptors that clients and their requests leave to the rest of the daemon, of `limit`."""
    return min(_RESERVED_AT_MOST, _RESERVED + limit // _RESERVED_SHARE)


def most_connections(configured: int, limit: int) -> int:
    """How many clients may be connected at one time. The request of each may need a second descriptor, the engine's."""
    return min(configured, max(_FEWEST, (limit - reserve(limit)) // 2))


def most_requests(connections: int) -> tuple[int, int]:
    """How many requests of models, and of models and the admin API together, may be open at one time; the other connections stay for
    those that are answered at once."""
    spare = min(_SPARE_AT_MOST, max(1, connections // _SPARE_SHARE))
    return max(1, connections - 2 * spare), max(1, connections - spare)


class Acceptor:
    """Has `make` called for every connection of `listening`, which the caller binds and closes.

    connections: those that are open. idle: those without a request, the longest idle one first. Beyond `most` a new connection takes
    the place of the longest idle one; where none is idle it is answered 503 and closed at once. Where descriptors run short although
    there are fewer, none is accepted for a while: clients wait in the kernel's queue.
    """

    def __init__(
        self,
        listening: Iterable[socket.socket],
        make: Callable[[], asyncio.Protocol],
        connections: Collection[object],
        idle: MutableMapping[Idle, None],
        configured: int,
        boundary: Boundary,
    ) -> None:
        self._listening = tuple(listening)
        self._make = make
        self._connections = connections
        self._idle = idle
        self._boundary = boundary
        self._loop = asyncio.get_running_loop()
        self._opening: dict[asyncio.Task[None], asyncio.Protocol] = {}
        self._resting: asyncio.TimerHandle | None = None
        self._full_until_s = self._short_until_s = 0.0
        self.set_most(configured)
        for listener in self._listening:
            listener.setblocking(False)
            listener.listen(BACKLOG)
        self._watch()

    def set_most(self, configured: int) -> None:
        """For a reload: connections beyond a smaller number stay."""
        self._limit = descriptor_limit()
        self._configured = configured
        self.most = most_connections(configured, self._limit)
        metrics.CONNECTIONS_MAX.set(self.most)
        if self.most < configured:
            log.warning(
                "at most %d clients may be connected at one time, not max_connections: %d: this process may have %d open files. "
                "Raise its limit (LimitNOFILE=, ulimit -n).",
                *(self.most, configured, self._limit),
            )

    @property
    def condition(self) -> Condition | None:
        """Why clients cannot connect. It stands until TOLD_S after the last time."""
        now_s = self._loop.time()
        if now_s < self._short_until_s:
            return Condition(
                "DescriptorsShort",
                f"Nearly all of the {self._limit} files that this process may open are open, and new clients have to wait. Raise its limit "
                "(LimitNOFILE=, ulimit -n).",
            )
        if now_s < self._full_until_s:
            cure = "Raise limits.max_connections."
            if self.most < self._configured:
                cure = f"Raise this process's limit of {self._limit} open files (LimitNOFILE=, ulimit -n)."
            return Condition(
                "ConnectionsFull",
                f"{self.most} clients are connected, the most allowed: idle connections are closed for new ones. {cure}",
            )
        return None

    async def close(self) -> None:
        """Accept no more, and return once what was accepted is open, so that the server can tell it to end. Before the sockets are closed.

        A connection takes two turns of the loop to open. Cancelled between them it would reset its client, and uvloop would never call
        connection_lost: the server would wait until drain_s for a connection that is gone.
        """
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        else:
            self._unwatch()
        if self._opening:
            await asyncio.wait(tuple(self._opening))

    # --- own ------------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        for listener in self._listening:
            self._loop.add_reader(listener, self._accept, listener)

    def _unwatch(self) -> None:
        for listener in self._listening:
            self._loop.remove_reader(listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                client, _ = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._rest()
                    return
                continue
            self._take(client)
            # The kernel gives the lowest number that is free: all below it are in use.
            if client.fileno() >= self._reserve_begins:
                self._rest()
                return

    @property
    def _reserve_begins(self) -> int:
        return self._limit - reserve(self._limit) // 2

    def _take(self, client: socket.socket) -> None:
        if self._open_connections >= self.most:
            self._full_until_s = self._tell("no more may be: idle ones are closed for new ones", self._full_until_s)
            if not self._displace():
                metrics.CONNECTIONS_TURNED_AWAY.labels("refused").inc()
                _turn_away(client)
                return
        connection = self._make()
        opening = self._boundary.spawn(self._loop, "accept", self._open(client, connection))
        self._opening[opening] = connection
        opening.add_done_callback(self._opening.pop)

    @property
    def _open_connections(self) -> int:
        return len(self._connections) + sum(connection not in self._connections for connection in self._opening.values())

    async def _open(self, client: socket.socket, connection: asyncio.Protocol) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, client)
        except OSError:
            client.close()  # it has gone
        except BaseException:
            client.close()
            raise

    def _displace(self) -> bool:
        """Closes the connection that has been idle for longest; False where none is idle."""
        for connection in self._idle:
            del self._idle[connection]
            metrics.CONNECTIONS_TURNED_AWAY.labels("displaced").inc()
            connection.give_way()
            return True
        return False

    def _rest(self) -> None:
        self._short_until_s = self._tell("accept rests until files are closed", self._short_until_s)
        metrics.ACCEPT_RESTS.inc()
        self._unwatch()
        self._look_again()

    def _look_again(self) -> None:
        for _ in range(AT_ONCE):
            self._displace()
        self._resting = self._loop.call_later(REST_S, self._resume)

    def _resume(self) -> None:
        self._resting = None
        if self._is_short():
            self._short_until_s = self._loop.time() + TOLD_S
            self._look_again()
        else:
            self._watch()

    def _is_short(self) -> bool:
        try:
            descriptor = os.dup(self._listening[0].fileno())
        except OSError:
            return True
        os.close(descriptor)
        return descriptor >= self._reserve_begins

    def _tell(self, consequence: str, until_s: float) -> float:
        """Until when the condition stays now; one line in the log where it is new."""
        now_s = self._loop.time()
        if now_s >= until_s:
            log.warning("%d clients are connected and %d files may be open: %s", self._open_connections, self._limit, consequence)
        return now_s + TOLD_S


def _turn_away(client: socket.socket) -> None:
    """Gives the descriptor back at once; who sends at this moment may see a reset instead of the answer."""
    count_refused(503)
    refusal = Unavailable("Too many connections are open; try again soon.", retry_after_s=1)
    request_id = new_request_id()
    body = error_bytes(refusal, request_id)
    head = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\nretry-after: 1\r\n"
    with suppress(OSError):
        client.setblocking(False)
        with suppress(BlockingIOError):
            client.recv(_READ_BYTES)  # what stays unread at the close resets the connection, and takes the answer away
        client.send(head + b"date: %b\r\nx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (date(), request_id.encode(), len(body)) + body)
    client.close()
