#!/usr/bin/python3
"""Stands in for /opt/sparkd/bin/sparkd in the boot test: the verbs serve and ray-node, and `ask`, which puts one question to either.

Never starts Ray or a model; a rank is a process in a session of its own that says who it is.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, "/opt/sparkd/src")

from sparkd.systemd import Systemd

RUN = Path("/run/sparkd")
STATE = Path("/var/lib/sparkd")
GATEWAY = 4000
PLACES = ("/tmp", "/dev/shm", "/run/sparkd", "/var/log/sparkd", "/var/lib/sparkd", "/etc/sparkd", "/usr", "/run", "/proc/sys/vm")


def main() -> None:
    verbs: dict[str, Callable[[], None]] = {
        "serve": serve,
        "ray-node": ray_node,
        "rank": rank,
        "ask": ask,
        "probe": probe,
        "check": lambda: None,
    }
    verbs[sys.argv[1]]()


def serve() -> None:
    if (STATE / "bad-config").exists():
        sys.exit(2)
    keys = Path(os.environ["CREDENTIALS_DIRECTORY"])
    service = Systemd.take()
    listener = service.listeners[0]
    listener.setblocking(True)
    facts = {
        "pid": os.getpid(),
        "listener": listener.getsockname(),
        "watchdog_s": service.watchdog_s,
        "credentials": {name: (keys / name).read_text().strip() or None for name in ("admin.key", "inference.key", "ray.token")},
        "writable": writable(),
        "devices": sorted(os.listdir("/dev")),
        "sees_rank": sees_rank(),
    }
    reloads = []

    def reload(*_: object) -> None:
        service.reloading("reading")
        reloads.append(1)
        service.ready(f"reloaded {len(reloads)}")

    def ping() -> None:
        while not (STATE / "hang").exists():
            service.watchdog()
            time.sleep(0.2)

    signal.signal(signal.SIGHUP, reload)
    threading.Thread(target=ping, daemon=True).start()
    service.ready("serving")
    answer(listener, facts)


def ray_node() -> None:
    service = Systemd.take()
    if not alive(rank_pid()):
        subprocess.Popen([sys.executable, __file__, "rank"], start_new_session=True)
    raylet = subprocess.Popen(["/bin/sleep", "infinity"])

    def end(*_: object) -> None:
        raylet.terminate()
        raylet.wait()
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    while not alive(rank_pid()):
        time.sleep(0.02)
    service.ready("ray is up")
    signal.pause()


def rank() -> None:
    Path("/tmp/of-the-rank").touch()
    (RUN / "rank.sock").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(RUN / "rank.sock"))
        listener.listen()
        (RUN / "rank.pid").write_text(str(os.getpid()))
        facts = {"pid": os.getpid(), "notify": os.environ.get("NOTIFY_SOCKET"), "writable": writable()}
        kept = Path("/tmp/of-the-rank")
        now = lambda: {"tmp_is_kept": kept.exists(), "cgroup": Path("/proc/self/cgroup").read_text(), "keys": keys_in_reach()}  # noqa: E731
        answer(listener, facts, now)


def ask() -> None:
    """`ask PORT` or `ask PATH`: print what the other end says."""
    where = sys.argv[2]
    family, address = (socket.AF_UNIX, where) if "/" in where else (socket.AF_INET, ("127.0.0.1", int(where)))
    with socket.socket(family) as connection:
        connection.settimeout(40)
        connection.connect(address)
        print(connection.makefile().read())


def probe() -> None:
    """What the page cache helper's sandbox lets its process write and reach."""
    files = (
        "/proc/sys/vm/drop_caches",
        "/proc/sys/vm/swappiness",
        "/proc/sys/kernel/core_pattern",
        "/proc/sysrq-trigger",
        "/etc/x",
        "/run/x",
    )
    found = {}
    for name in files:
        try:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT))
            found[name] = "open"
        except OSError as error:
            found[name] = error.strerror
    print(json.dumps({"files": found, "uid": os.getuid(), "links": sorted(os.listdir("/sys/class/net"))}))


def answer(listener: socket.socket, facts: dict[str, Any], now: Callable[[], dict[str, Any]] = dict) -> None:
    while True:
        connection, _ = listener.accept()
        connection.sendall(json.dumps(facts | now()).encode())
        connection.close()


def writable() -> list[str]:
    return [place for place in PLACES if os.access(place, os.W_OK)]


def keys_in_reach() -> list[str]:
    """Where an engine can read what only the daemon is shown: by the root folder, the environment or the memory of another process."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        for place in ("root/run/credentials/sparkd.service/admin.key", "cwd/../../../run/credentials/sparkd.service/admin.key"):
            try:
                if (process / place).read_bytes():
                    found.append(f"{process}/{place}")
            except OSError:
                continue
    return found


def rank_pid() -> int:
    try:
        return int((RUN / "rank.pid").read_text() or "0")
    except OSError:
        return 0


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return pid > 0


def sees_rank() -> bool:
    """As an adopting daemon must: its environment (for our mark) and its state, by /proc."""
    try:
        return all(Path(f"/proc/{rank_pid()}/{name}").read_bytes() for name in ("environ", "stat"))
    except OSError:
        return False


if __name__ == "__main__":
    main()
