"""A process of the daemon's user sees nothing of the daemon's environment, memory, files and root folder in /proc."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from collections.abc import Callable, Iterator
from configparser import RawConfigParser
from contextlib import contextmanager
from pathlib import Path

import pytest

from sparkd.config.config import load_config
from sparkd.daemon import daemon
from workers.host import processes

ROOT = os.geteuid() == 0
USER = 65534 if ROOT else os.getuid()
UNITS = Path(__file__).resolve().parents[2] / "deploy"
# linux/prctl.h, linux/capability.h
PR_SET_KEEPCAPS, VERSION_3 = 8, 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


def become_seen() -> None:
    """A process of an ordinary user, as exec(2) makes one: changing the user had hidden it."""
    if ROOT:
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
    assert processes.prctl(processes.PR_SET_DUMPABLE, ctypes.c_ulong(1))


def keep_one_capability() -> None:
    """The lowest that this machine's root has, in place of the one of the unit: which it is does not matter to the kernel."""
    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapPrm:"))
    lowest = int(held.split()[1], 16)
    lowest &= -lowest
    assert lowest and processes.prctl(PR_SET_KEEPCAPS, ctypes.c_ulong(1))
    become_seen()
    low, high = lowest & 0xFFFFFFFF, lowest >> 32
    header, data = struct.pack("II", VERSION_3, 0), struct.pack("IIIIII", low, low, 0, high, high, 0)
    assert _libc.capset(header, data) == 0, os.strerror(ctypes.get_errno())


@contextmanager
def process(prepare: Callable[[], object]) -> Iterator[int]:
    """A child that has done that, and waits."""
    ready, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            prepare()
            os.write(said, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(said)
    try:
        assert os.read(ready, 1) == b"x"
        yield pid
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def seen(pid: int, prepare: Callable[[], object] = become_seen) -> set[str]:
    """Which of these another process, prepared so, can look at."""
    reading, writing = os.pipe()
    looker = os.fork()
    if looker == 0:
        try:
            prepare()
            found = []
            for name, look in LOOKS.items():
                try:
                    look(f"/proc/{pid}/{name}")
                    found.append(name)
                except PermissionError:
                    continue
            os.write(writing, ",".join(found).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        text = answer.read()
    os.waitpid(looker, 0)
    return set(filter(None, text.split(",")))


def _read(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.read(handle, 1)
    os.close(handle)


LOOKS: dict[str, Callable[[str], object]] = {
    "environ": _read, "maps": _read, "fd/0": os.readlink, "root": os.readlink, "cwd": os.readlink, "exe": os.readlink,
    "mem": lambda path: os.close(os.open(path, os.O_RDONLY)),
}  # fmt: skip


def hidden() -> None:
    become_seen()
    assert processes.hide()
    # The daemon still reads its own files in /proc.
    assert os.listdir("/proc/self/fd") and Path("/proc/self/maps").read_bytes() and Path("/proc/self/smaps_rollup").read_bytes()
    assert Path("/proc/self/status").read_bytes() and Path("/proc/self/stat").read_bytes() and Path("/proc/self/limits").read_bytes()
    assert all(os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2))


def test_a_process_that_hides_is_not_looked_into_and_one_that_does_not_is() -> None:
    with process(become_seen) as pid:
        assert seen(pid) == set(LOOKS)
    with process(hidden) as pid:
        assert seen(pid) == set()


def test_nobody_looks_into_a_daemon_that_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of `serve` but for what it serves, in a process of its own, as another process of the same user sees it."""
    config = load_config(None, flags={"state_dir": str(tmp_path)}, environ={})

    async def serve(*_: object) -> None:
        return

    monkeypatch.setattr(daemon, "_serve", serve)
    monkeypatch.setattr(daemon.memlock, "lock", lambda: None)
    # Imported here: the child's user may not be able to read the folders of this Python.
    daemon._fast_loop()

    def begin() -> None:
        become_seen()
        daemon.serve(config, daemon.Options())

    with process(begin) as pid:
        assert seen(pid) == set()


def test_who_lacks_a_capability_of_a_process_cannot_look_into_it_and_the_other_way_round_it_can() -> None:
    """This keeps an engine from the daemon's credentials, also through the daemon's children, and lets the daemon adopt engines."""
    if not ROOT:
        pytest.skip("only root can give a process a capability")
    with process(keep_one_capability) as pid:
        assert seen(pid) == set()
        assert seen(pid, keep_one_capability) == set(LOOKS)
    with process(become_seen) as pid:
        assert seen(pid, keep_one_capability) == set(LOOKS)


def test_the_daemons_unit_has_a_capability_that_rays_lacks() -> None:
    units = {name: RawConfigParser(strict=False, allow_no_value=True) for name in ("sparkd", "sparkd-ray")}
    for name, unit in units.items():
        unit.optionxform = str  # type: ignore[assignment, method-assign]
        unit.read(UNITS / f"{name}.service")
    daemons, rays = (units[name]["Service"] for name in ("sparkd", "sparkd-ray"))
    assert daemons["AmbientCapabilities"] == daemons["CapabilityBoundingSet"] == "CAP_BLOCK_SUSPEND"
    assert (rays["AmbientCapabilities"], rays["CapabilityBoundingSet"], rays["NoNewPrivileges"]) == ("", "", "yes")
    assert daemons["User"] == rays["User"]


def test_the_daemon_hides_before_it_reads_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    async def serve(*_: object) -> None:
        steps.append("serves")

    monkeypatch.setattr(daemon.processes, "hide", lambda: steps.append("hides") or True)
    monkeypatch.setattr(daemon.memlock, "lock", lambda: None)
    monkeypatch.setattr(daemon, "_serve", serve)
    daemon.serve(load_config(None, flags={"state_dir": str(tmp_path)}, environ={}), daemon.Options())

    assert steps == ["hides", "serves"]
