"""Talks with systemd as a service does: notifications, watchdog, sockets.

Sources: sd_notify(3), sd_watchdog_enabled(3), sd_listen_fds(3), systemd.exec(5). Without systemd every part is absent and
every notification a no-op.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import MutableMapping
from dataclasses import dataclass

from sparkd.errors import ConfigError

FIRST_FD = 3
# The manager's queue is full only when it hangs; then a lost ping must not make us hang with it.
SEND_TIMEOUT_S = 0.5
_VARIABLES = (
    *("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "CREDENTIALS_DIRECTORY"),
    *("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "LISTEN_PIDFDID"),
)


@dataclass(frozen=True, slots=True)
class Systemd:
    """The service manager as this process sees it.

    watchdog_s: seconds of silence after which systemd kills the process, None where it does not watch.
    listeners: the listening stream sockets that systemd holds.
    """

    notify_socket: str | None = None
    watchdog_s: float | None = None
    listeners: tuple[socket.socket, ...] = ()

    @classmethod
    def take(cls, environ: MutableMapping[str, str] | None = None) -> Systemd:
        """Read systemd's variables and remove them, so that no child takes them for its own: a rank must not speak for the daemon.

        Listening sockets can be taken once per process. Raises ConfigError for a socket unit whose socket is no listening stream socket.
        """
        environment = os.environ if environ is None else environ
        taken = {name: environment.pop(name) for name in _VARIABLES if name in environment}
        return cls(notify_socket=taken.get("NOTIFY_SOCKET") or None, watchdog_s=_watchdog_s(taken), listeners=_listeners(taken))

    @property
    def supervised(self) -> bool:
        """True where systemd runs us as a notifying service: then SIGTERM means let go of the engines, not end them."""
        return self.notify_socket is not None

    @property
    def ping_interval_s(self) -> float | None:
        """How often to call `watchdog`: half of the deadline, as sd_watchdog_enabled(3) advises."""
        return None if self.watchdog_s is None else self.watchdog_s / 2

    def ready(self, status: str) -> bool:
        """Started, or done reloading. Like every notification: True when systemd has it, never an error, at most SEND_TIMEOUT_S.

        status: one line for `systemctl status`.
        """
        return self._notify("READY=1", f"STATUS={status}")

    def reloading(self, status: str) -> bool:
        """A reload begins; `ready` ends it. The time stamp is what Type=notify-reload asks for (microseconds of CLOCK_MONOTONIC)."""
        stamp_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        return self._notify("RELOADING=1", f"MONOTONIC_USEC={stamp_us}", f"STATUS={status}")

    def stopping(self, status: str) -> bool:
        return self._notify("STOPPING=1", f"STATUS={status}")

    def watchdog(self) -> bool:
        return self._notify("WATCHDOG=1")

    def _notify(self, *lines: str) -> bool:
        if self.notify_socket is None:
            return False
        address = "\0" + self.notify_socket[1:] if self.notify_socket.startswith("@") else self.notify_socket
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
                channel.settimeout(SEND_TIMEOUT_S)
                channel.connect(address)
                channel.send("\n".join(lines).encode())
        except OSError:  # systemd is gone or hangs: the service goes on, and no message would reach it
            return False
        return True


def _watchdog_s(taken: dict[str, str]) -> float | None:
    watched = int(taken.get("WATCHDOG_PID", os.getpid())) == os.getpid()
    microseconds = int(taken.get("WATCHDOG_USEC", 0))
    return microseconds / 1e6 if watched and microseconds else None


def _listeners(taken: dict[str, str]) -> tuple[socket.socket, ...]:
    if int(taken.get("LISTEN_PID", 0)) != os.getpid():
        return ()
    return tuple(_listener(FIRST_FD + number) for number in range(int(taken.get("LISTEN_FDS", 0))))


def _listener(fd: int) -> socket.socket:
    """The descriptor as a socket object: non-blocking, and closed in children."""
    os.set_inheritable(fd, False)
    listener = socket.socket(fileno=fd)
    if listener.type != socket.SOCK_STREAM or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.detach()
        raise ConfigError(f"Descriptor {fd} is not a listening stream socket. Use ListenStream= and Accept=no in the socket unit.")
    listener.setblocking(False)
    return listener
