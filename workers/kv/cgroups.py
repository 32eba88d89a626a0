"""Owns the bytes that this process may still take under its control groups' memory limits (version 2). Never sets one.

Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
# The kernel reclaims most clean, unused page cache at once; some of it is mapped or under write-back.
RECLAIMABLE_SHARE = 0.8


def cgroup_left(proc: Path, cgroup: Path = CGROUP) -> int | None:
    """Bytes that are left in the tightest of this process's group and its ancestors. A group's page cache counts as free. None without a
    limit."""
    lines = (_read(proc / "self" / "cgroup") or "").splitlines()
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    if path is None:
        return None
    left: int | None = None
    folder = cgroup / path.strip("/")
    for group in (folder, *folder.parents):
        if not group.is_relative_to(cgroup):
            break
        left = least(left, _left_of(group))
    return left


def least(this: int | None, other: int | None) -> int | None:
    return other if this is None else this if other is None else min(this, other)


def _left_of(group: Path) -> int | None:
    limit = _read(group / "memory.max")
    if limit is None or limit == "max":
        return None
    try:
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    files = sum(int(stat.get(name, 0)) for name in ("active_file", "inactive_file"))
    return max(0, int(limit) - used + int(RECLAIMABLE_SHARE * files))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
