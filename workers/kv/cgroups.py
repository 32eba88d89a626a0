"""Owns the bytes that this process may still take under its control groups' memory limits, of both versions. Never sets one.

Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst; a host may have both, the memory controller in one of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
# The kernel reclaims most clean, unused page cache at once; some of it is mapped or under write-back.
RECLAIMABLE_SHARE = 0.8
# In version 1 "no limit" is PAGE_COUNTER_MAX pages, close to the largest signed number of bytes.
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class _Version:
    """The file names of one cgroup version. files: keys of memory.stat for reclaimable page cache, with the groups below."""

    limit: str
    used: str
    files: tuple[str, str]


_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_V2 = _Version("memory.max", "memory.current", ("active_file", "inactive_file"))


def cgroup_left(proc: Path, cgroup: Path = CGROUP) -> int | None:
    """Bytes that are left in the tightest of this process's groups and their ancestors. A group's page cache counts as free. None without
    a limit."""
    left: int | None = None
    for version, mount, path in _groups(proc, cgroup):
        folder = Path(os.path.normpath(f"{mount}/{path}"))
        while folder.is_relative_to(mount):
            left = least(left, _left_of(folder, version))
            if folder == mount:
                break
            folder = folder.parent
            if version is _V1 and _read(folder / "memory.use_hierarchy") == "0":
                break  # a group there does not count what those below it take
    return left


def least(this: int | None, other: int | None) -> int | None:
    return other if this is None else this if other is None else min(this, other)


def _groups(proc: Path, cgroup: Path) -> Iterator[tuple[_Version, Path, str]]:
    """(version, mount point, path of this process's group below the mount point)."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = _mounts(proc)
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield _below(_V2, mounts.get("cgroup2", [("/", cgroup)]), path)
        elif "memory" in controllers.split(","):
            yield _below(_V1, mounts.get("memory", [("/", cgroup / "memory")]), path)


def _below(version: _Version, mounts: list[tuple[str, Path]], path: str) -> tuple[_Version, Path, str]:
    """The group's path below its mount. A container sees its group as the root of a mount, but without a cgroup namespace /proc/self/cgroup
    has the host's path."""
    for root, mount in mounts:
        inside = os.path.relpath(path, root)
        if inside != ".." and not inside.startswith("../"):
            return version, mount, inside
    return version, mounts[0][1], "."


def _mounts(proc: Path) -> dict[str, list[tuple[str, Path]]]:
    """(root, mount point) of every mount of `cgroup2`, and of `memory` for version 1 (proc_pid_mountinfo(5))."""
    mounts: dict[str, list[tuple[str, Path]]] = {}
    for line in (_read(proc / "self" / "mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) < 6 or len(kind) < 3:
            continue
        name = "cgroup2" if kind[0] == "cgroup2" else "memory" if kind[0] == "cgroup" and "memory" in kind[2].split(",") else None
        if name is not None:
            mounts.setdefault(name, []).append((_plain(fields[3]), Path(_plain(fields[4]))))
    return mounts


def _plain(path: str) -> str:
    """The path without the octal escapes that the kernel writes for blanks."""
    for octal, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(octal, char)
    return path


def _left_of(folder: Path, version: _Version) -> int | None:
    limit = _read(folder / version.limit)
    if limit is None or limit == "max":
        return None
    try:
        if int(limit) >= _NO_LIMIT:
            return None
        used = int((folder / version.used).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        files = sum(int(stat.get(name, 0)) for name in version.files)
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used + int(RECLAIMABLE_SHARE * files))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
