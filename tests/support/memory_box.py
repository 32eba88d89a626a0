"""A machine of a few GiB within this one: a memory cgroup (v1 or v2), and a /proc/meminfo that shows it, in a mount namespace.

What is run in it (`command`) sees the cgroup's memory as the machine's, as a container under lxcfs does; who takes too much there meets the
kernel's own OOM killer, and nobody outside notices. Needs root. Never touches a cgroup that it has not made.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.support.waiting import until

MIRROR_S = 0.02
GIB = 1 << 30
_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
# The shell's own number goes into the cgroup, then it becomes the command. Some (Ray) read the root's figures, as in a container.
_ENTER = """
echo $$ >"$1/cgroup.procs" || exit 1
exec unshare --mount --propagation private sh -c '
  mount --bind "$2" /proc/meminfo && mount --bind "$1" "$3" || exit 1
  shift 3; exec "$@"' sh "$@"
"""


class NoBox(RuntimeError):
    """This machine permits no memory cgroup; the message says why."""


class MemoryBox:
    """Of `limit_bytes`. Raises NoBox."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.version = 1 if (_V1 / "memory.limit_in_bytes").exists() else 2
        self.group = _own_group(self.version) / f"sparkd-box-{os.getpid()}"
        self._meminfo = folder / "meminfo"
        self.least_available_bytes = limit_bytes
        try:
            self.group.mkdir()
            (self.group / ("memory.limit_in_bytes" if self.version == 1 else "memory.max")).write_text(str(limit_bytes))
        except OSError as error:
            with contextlib.suppress(OSError):
                self.group.rmdir()
            raise NoBox(f"no memory cgroup can be made at {self.group}: {error.strerror}") from error
        self._meminfo.write_bytes(self._text())
        self._over = threading.Event()
        self._mirror = threading.Thread(target=self._show, daemon=True)
        self._mirror.start()

    def command(self, words: Sequence[str]) -> list[str]:
        return ["sh", "-c", _ENTER, "sh", str(self.group), str(self._meminfo), str(_V1 if self.version == 1 else _V2), *words]

    def available_bytes(self) -> int:
        """The limit less what could not be dropped: page cache can."""
        used, stat = self._number("memory.usage_in_bytes", "memory.current"), self._stat()
        names = ("total_inactive_file", "total_active_file") if self.version == 1 else ("inactive_file", "active_file")
        return max(0, self.limit_bytes - used + sum(stat[name] for name in names))

    def oom_kills(self) -> int:
        """How often the kernel had to kill somebody here."""
        lines = (self.group / ("memory.oom_control" if self.version == 1 else "memory.events")).read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.split()[0] == "oom_kill"), 0)

    def take_in(self, pid: int) -> None:
        """A process that is there already; what it holds by then stays where it is."""
        (self.group / "cgroup.procs").write_text(str(pid))

    def pids(self) -> list[int]:
        return [int(pid) for pid in (self.group / "cgroup.procs").read_text().split()]

    def close(self) -> None:
        """Everybody in it must have ended."""
        self._over.set()
        self._mirror.join()
        until(self._removed, f"{self.group} is empty", 0.1)

    def _removed(self) -> bool:
        with contextlib.suppress(OSError):
            self.group.rmdir()
        return not self.group.exists()

    def _show(self) -> None:
        """Written in place and as long as before: a bind mount keeps the file itself, and a reader must see it whole."""
        with open(self._meminfo, "r+b", buffering=0) as file:
            while not self._over.wait(MIRROR_S):
                os.pwrite(file.fileno(), self._text(), 0)

    def _text(self) -> bytes:
        available = self.available_bytes()
        self.least_available_bytes = min(self.least_available_bytes, available)
        free = max(0, self.limit_bytes - self._number("memory.usage_in_bytes", "memory.current"))
        rows = {"MemTotal": self.limit_bytes, "MemFree": free, "MemAvailable": available, "Buffers": 0, "Cached": available - free}
        rows |= {"SwapTotal": 0, "SwapFree": 0, "Shmem": 0}
        return "".join(f"{name + ':':<15} {max(0, value) >> 10:>10} kB\n" for name, value in rows.items()).encode()

    def _number(self, v1: str, v2: str) -> int:
        return int((self.group / (v1 if self.version == 1 else v2)).read_text())

    def _stat(self) -> dict[str, int]:
        lines = (line.split() for line in (self.group / "memory.stat").read_text().splitlines())
        return {name: int(value) for name, value in lines}


def _own_group(version: int) -> Path:
    """Where this process is: what is made below stays within what it may use."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if version == 1 and "memory" in controllers.split(","):
            return _V1 / path.strip("/")
        if version == 2 and not controllers:
            return _V2 / path.strip("/")
    raise NoBox("this process is in no memory cgroup")
