"""Talks with systemd as a service does: notifications, watchdog, sockets, credentials.

Sources: sd_notify(3), sd_watchdog_enabled(3), sd_listen_fds(3), systemd.exec(5) "Credentials". Without systemd every part is absent and
every notification a no-op.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from sparkd.errors import ConfigError

FIRST_FD = 3
CREDENTIAL_BYTES = 1 << 20
# The manager's queue is full only when it hangs; then a lost ping must not make us hang with it.
SEND_TIMEOUT_S = 0.5
_VARIABLES = (
    *("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "CREDENTIALS_DIRECTORY"),
    *("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "LISTEN_PIDFDID"),
)


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening stream socket that systemd holds. name: FileDescriptorName= of the socket unit, `unknown` without one."""

    name: str
    socket: socket.socket


@dataclass(frozen=True, slots=True)
class Systemd:
    """The service manager as this process sees it.

    watchdog_s: seconds of silence after which systemd kills the process, None where it does not watch.
    credentials: their folder, None without.
    """

    notify_socket: str | None = None
    watchdog_s: float | None = None
    listeners: tuple[Listener, ...] = ()
    credentials: Path | None = None

    @classmethod
    def take(cls, environ: MutableMapping[str, str] | None = None) -> Systemd:
        """Read systemd's variables and remove them, so that no child takes them for its own: a rank must not speak for the daemon.

        Listening sockets can be taken once per process. Raises ConfigError for variables or descriptors that cannot be what systemd passes.
        """
        environment = os.environ if environ is None else environ
        taken = {name: environment.pop(name) for name in _VARIABLES if name in environment}
        credentials = taken.get("CREDENTIALS_DIRECTORY")
        return cls(
            notify_socket=_notify_socket(taken),
            watchdog_s=_watchdog_s(taken),
            listeners=_listeners(taken),
            credentials=Path(credentials) if credentials else None,
        )

    @property
    def supervised(self) -> bool:
        """True where systemd runs us as a notifying service: then SIGTERM means let go of the engines, not end them."""
        return self.notify_socket is not None

    @property
    def ping_interval_s(self) -> float | None:
        """How often to call `watchdog`: half of the deadline, as sd_watchdog_enabled(3) advises."""
        return None if self.watchdog_s is None else self.watchdog_s / 2

    def ready(self, status: str = "") -> bool:
        """Started, or done reloading. Like every notification: True when systemd has it, never an error, at most SEND_TIMEOUT_S."""
        return self._notify("READY=1", *_status(status))

    def reloading(self, status: str = "") -> bool:
        """A reload begins; `ready` ends it. The time stamp is what Type=notify-reload asks for (microseconds of CLOCK_MONOTONIC)."""
        stamp_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        return self._notify("RELOADING=1", f"MONOTONIC_USEC={stamp_us}", *_status(status))

    def stopping(self, status: str = "") -> bool:
        return self._notify("STOPPING=1", *_status(status))

    def watchdog(self) -> bool:
        return self._notify("WATCHDOG=1")

    def status(self, text: str) -> bool:
        """One line for `systemctl status`."""
        return self._notify(*_status(text))

    def credential(self, name: str) -> str | None:
        """The text of one credential without surrounding white space; None where there is none or it is empty. Raises ConfigError.

        The content never appears in an error.
        """
        if self.credentials is None:
            return None
        if not name or "/" in name or name in (".", ".."):
            raise ConfigError(f"{name!r} cannot name a credential: systemd's names are plain file names.")
        path = self.credentials / name
        try:
            with path.open("rb") as file:
                content = file.read(CREDENTIAL_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            reason = f"The credential {name} cannot be read: {error.strerror}. Check LoadCredential= in the unit."
            raise ConfigError(reason, file=str(path)) from error
        if len(content) > CREDENTIAL_BYTES:
            raise ConfigError(f"The credential {name} is larger than systemd allows (1 MiB). Put only the key into it.", file=str(path))
        try:
            return content.decode("utf-8").strip() or None
        except UnicodeDecodeError:
            raise ConfigError(f"The credential {name} is not UTF-8 text. Write the key as plain text.", file=str(path)) from None

    def _notify(self, *lines: str) -> bool:
        if self.notify_socket is None or not lines:
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


def _status(text: str) -> tuple[str, ...]:
    """One line: a newline would begin another assignment."""
    return (f"STATUS={' '.join(text.split())}",) if text else ()


def _notify_socket(taken: dict[str, str]) -> str | None:
    """Only AF_UNIX, by path or abstract: systemd uses other families only towards virtual machines."""
    address = taken.get("NOTIFY_SOCKET") or None
    if address is not None and address[0] not in "/@":
        reason = f"NOTIFY_SOCKET={address!r} is neither a path nor an abstract socket ('@name')."
        raise ConfigError(f"{reason} Unset it, or start sparkd by systemd.")
    return address


def _watchdog_s(taken: dict[str, str]) -> float | None:
    if not taken.get("WATCHDOG_USEC"):
        return None
    if "WATCHDOG_PID" in taken and _number(taken, "WATCHDOG_PID") != os.getpid():
        return None
    microseconds = _number(taken, "WATCHDOG_USEC")
    return microseconds / 1e6 if microseconds else None


def _listeners(taken: dict[str, str]) -> tuple[Listener, ...]:
    if not taken.get("LISTEN_FDS") or not taken.get("LISTEN_PID") or _number(taken, "LISTEN_PID") != os.getpid():
        return ()
    names = taken.get("LISTEN_FDNAMES", "").split(":")
    count = _number(taken, "LISTEN_FDS")
    return tuple(Listener(names[i] if i < len(names) and names[i] else "unknown", _listener(FIRST_FD + i)) for i in range(count))


def _listener(fd: int) -> socket.socket:
    """The descriptor as a socket object: non-blocking, and closed in children."""
    try:
        os.set_inheritable(fd, False)
        listener = socket.socket(fileno=fd)
    except OSError as error:
        raise ConfigError(f"LISTEN_FDS names descriptor {fd}, which is not a socket: {error.strerror}. Check the socket unit.") from error
    if listener.type != socket.SOCK_STREAM or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.detach()
        raise ConfigError(f"Descriptor {fd} is not a listening stream socket. Use ListenStream= and Accept=no in the socket unit.")
    listener.setblocking(False)
    return listener


def _number(taken: dict[str, str], name: str) -> int:
    if not (taken[name].isascii() and taken[name].isdigit()):
        raise ConfigError(f"{name}={taken[name]!r} is not a number. Unset it, or start sparkd by systemd.")
    return int(taken[name])
