"""Every bound of the data plane, with its default and unit."""

from __future__ import annotations

import resource
from dataclasses import dataclass

_KIB = 1024
_MIB = 1024 * _KIB
# The daemon with Ray, its store and one engine has 55 descriptors (measured); threads of Ray, agents, scrapes and log files want more.
_RESERVED_DESCRIPTORS = 128
_FEWEST_CONNECTIONS = 8


def descriptor_limit() -> int:
    """RLIMIT_NOFILE of this process, the soft one: what open(2) goes by."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if limit != resource.RLIM_INFINITY else 1 << 30


def most_connections(configured: int, descriptors: int) -> int:
    """How many clients may be connected at one time. The request of each may need a second descriptor, the engine's."""
    return min(configured, max(_FEWEST_CONNECTIONS, (descriptors - _RESERVED_DESCRIPTORS) // 2))


def most_requests(connections: int) -> tuple[int, int]:
    """How many requests of models, and of models and the admin API together, may be open at one time; the other connections stay for
    those that are answered at once."""
    spare = min(32, max(1, connections // 16))
    return max(1, connections - 2 * spare), max(1, connections - spare)


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """The most that one client, and all of them together, may take.

    header_bytes, header_count   request line and headers of one request; beyond: 431
    header_s                     from the first byte (or the connection) to the end of the headers; beyond: 408, or a close if silent
    body_bytes                   one request body; beyond: 413
    admin_body_bytes             one body for the admin API; beyond: 413
    body_grace_s, body_rate      a body must be in after body_grace_s plus one second per body_rate bytes; beyond: 408
    buffered_bytes               all bodies that arrived in pieces, together; beyond: 503
    keep_alive_s                 an idle connection between two requests
    client_write_s               a reader must make room in its buffer within this time; beyond: the connection is cut
    linger_s                     how long the rest of a refused body is read and thrown away, so that the refusal is seen
    cut_s                        how long after its last bytes an answer that failed is cut, so that they are seen
    connections                  at one time; beyond, an idle one is closed for a new one, else: 503
    requests, any_requests       of models, and with those of the admin API, at one time; beyond: 503. Fewer than connections, so that
                                 probes and /metrics are answered at any time
    heartbeat_s                  how often a client of a stream hears of sparkd while nothing else comes; 0: never
    """

    header_bytes: int = 32 * _KIB
    header_count: int = 128
    header_s: float = 10.0
    body_bytes: int = 32 * _MIB
    admin_body_bytes: int = 2 * _MIB
    body_grace_s: float = 60.0
    body_rate: int = _MIB
    buffered_bytes: int = 256 * _MIB
    keep_alive_s: float = 75.0
    client_write_s: float = 120.0
    linger_s: float = 2.0
    cut_s: float = 0.5
    connections: int = 4096
    requests: int = 4032
    any_requests: int = 4064
    heartbeat_s: float = 10.0


def too_large(limit: int, how: str = "") -> str:
    """The message to a client whose body has more than `limit` bytes."""
    return f"The body is larger than {limit / _MIB:g} MiB{how}. Send less, or raise limits.max_body_bytes, which bounds bodies for models."
