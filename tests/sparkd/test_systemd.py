"""What systemd passes in and hears back: real datagram sockets, real descriptors in a real child."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkd import systemd
from sparkd.systemd import Systemd
from tests.support.waiting import HUNG_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """NOTIFY_SOCKET as systemd writes it, and its other end."""
    address = str(tmp_path / "notify") if request.param == "path" else f"@sparkd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(address.replace("@", "\0", 1))
        end.settimeout(HUNG_S)
        yield address, end


def test_notifications_arrive_as_systemd_reads_them(manager: tuple[str, socket.socket]) -> None:
    address, end = manager
    service = Systemd.take({"NOTIFY_SOCKET": address})
    said = [
        (service.ready("serving 2 models"), ["READY=1", "STATUS=serving 2 models"]),
        (service.stopping("open requests may finish"), ["STOPPING=1", "STATUS=open requests may finish"]),
        (service.watchdog(), ["WATCHDOG=1"]),
    ]
    for delivered, expected in said:
        assert delivered
        assert end.recv(4096).decode().split("\n") == expected


def test_reloading_carries_a_monotonic_time_stamp(manager: tuple[str, socket.socket]) -> None:
    address, end = manager
    assert Systemd.take({"NOTIFY_SOCKET": address}).reloading("reading the configuration")
    first, stamp, status = end.recv(4096).decode().split("\n")
    assert (first, status) == ("RELOADING=1", "STATUS=reading the configuration")
    name, _, number = stamp.partition("=")
    assert name == "MONOTONIC_USEC"
    assert number.isdigit()


def test_a_manager_that_is_gone_is_no_error(tmp_path: Path) -> None:
    assert not Systemd.take({"NOTIFY_SOCKET": str(tmp_path / "missing")}).ready("serving")


def test_a_manager_that_does_not_read_costs_no_more_than_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "SEND_TIMEOUT_S", 0.01)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "notify"))
        service = Systemd.take({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        delivered = 0
        while delivered < 100_000 and service.watchdog():
            delivered += 1
        assert 0 < delivered < 100_000


def test_without_systemd_everything_is_absent_and_silent() -> None:
    service = Systemd.take({"PATH": "/bin"})
    assert service == Systemd()
    assert not service.supervised
    assert service.ping_interval_s is None
    assert not service.ready("serving")
    assert not service.watchdog()


def test_take_leaves_nothing_for_children() -> None:
    environ = {
        "NOTIFY_SOCKET": "/run/systemd/notify",
        "WATCHDOG_USEC": "30000000",
        "WATCHDOG_PID": str(os.getpid()),
        "LISTEN_FDS": "1",
        "LISTEN_PID": "1",
        "LISTEN_FDNAMES": "gateway",
        "CREDENTIALS_DIRECTORY": "/run/credentials/sparkd.service",
        "PATH": "/bin",
    }
    service = Systemd.take(environ)
    assert environ == {"PATH": "/bin"}
    assert service.supervised
    assert service.listeners == ()


@pytest.mark.parametrize(
    ("environ", "deadline_s", "interval_s"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0, 15.0),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": str(os.getpid())}, 0.5, 0.25),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid() + 1)}, None, None),
        ({"WATCHDOG_USEC": "0"}, None, None),
    ],
)
def test_watchdog_deadline(environ: dict[str, str], deadline_s: float | None, interval_s: float | None) -> None:
    service = Systemd.take(dict(environ))
    assert service.watchdog_s == deadline_s
    assert service.ping_interval_s == interval_s


CHILD = """
    import os, subprocess, sys
    from sparkd.systemd import Systemd

    found = Systemd.take()
    command = ["/bin/sh", "-c", "ls -l /proc/$$/fd; env"]
    inherited = subprocess.run(command, stdout=subprocess.PIPE, text=True, close_fds=False).stdout
    for listener in found.listeners:
        inode = os.fstat(listener.fileno()).st_ino
        print(listener.getsockname()[1], listener.getblocking(), f"socket:[{inode}]" in inherited)
    print("LISTEN_" in inherited, Systemd.take().listeners, flush=True)
    sys.stdin.read()
    for listener in found.listeners:
        connection, _ = listener.accept()
        connection.sendall(b"here")
        connection.close()
"""


def with_descriptors(descriptors: list[int], environ: dict[str, str]) -> subprocess.Popen[str]:
    """Run CHILD, whose descriptors 3, 4 ... are these and whose LISTEN_PID is its own, as systemd's exec does it."""
    targets = range(3, 3 + len(descriptors))
    aside = [f"{100 + target}<&{fd}" for target, fd in zip(targets, descriptors, strict=True)]
    moves = [*aside, *(f"{target}<&{100 + target}" for target in targets)]
    closes = [f"{fd}<&-" for fd in {*descriptors, *(100 + target for target in targets)} - {*targets}]
    shell = f'exec {" ".join(moves)}; exec {" ".join(closes)}; LISTEN_PID=$$ exec "$@"'
    return subprocess.Popen(
        ["bash", "-c", shell, "bash", sys.executable, "-c", textwrap.dedent(CHILD)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environ},
        pass_fds=descriptors,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_listening_sockets_are_taken_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        ports = [first.getsockname()[1], second.getsockname()[1]]
        environ = {"LISTEN_FDS": "2"}
        with with_descriptors([first.fileno(), second.fileno()], environ) as child:
            assert child.stdout is not None
            lines = [child.stdout.readline().strip() for _ in range(3)]
            # Nobody accepts yet: the connections wait in the backlog, as they do while a daemon restarts.
            waiting = [socket.create_connection(("127.0.0.1", port), timeout=HUNG_S) for port in ports]
            _, errors = child.communicate(timeout=HUNG_S)
        answers = [connection.recv(100) for connection in waiting]
        for connection in waiting:
            connection.close()
    assert child.returncode == 0, errors
    assert lines == [f"{ports[0]} False False", f"{ports[1]} False False", "False ()"]
    assert answers == [b"here", b"here"]


def test_sockets_for_another_process_are_not_ours() -> None:
    assert Systemd.take({"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid() + 1)}).listeners == ()
