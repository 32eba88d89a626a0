"""Lets one daemon lend a machine's memory: two would each lend all of it, whoever their users are."""

from __future__ import annotations

import errno
import pwd
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from sparkd.errors import StateError

# A name of Linux's abstract namespace (unix(7)): no file, and the kernel frees it however its process ends. Each network namespace has its
# own, so a container with a network of its own counts as a machine.
NAME = "\0sparkd.machine"
# A process that asks for the holder waits in the holder's queue, and no reader empties it.
ASKERS = 4096


@contextmanager
def machine_lock() -> Iterator[None]:
    """Hold this machine. Raises StateError naming the process that holds it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as held:
        try:
            held.bind(NAME)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            problem = f"Another sparkd ({_holder()}) lends this machine's memory, and two would lend it twice."
            raise StateError(f"{problem} Use that daemon, or stop it first (`kill -INT PROCESS`, as Ctrl-C does).") from None
        held.listen(ASKERS)
        yield


def _holder() -> str:
    """The process and its user, as the kernel noted them when it began to listen."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(NAME)
            pid, user, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        except OSError:
            return "an unknown process"
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        name = str(user)
    return f"process {pid or 'unknown'} of user {name}"
