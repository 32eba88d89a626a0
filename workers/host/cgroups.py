"""Owns the memory limits of this process's control groups (version 2), and what they leave. Never sets one.

Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
# In each group's folder: its limit, what it holds, and of that the page cache.
LIMIT, USED, STAT = "memory.max", "memory.current", "memory.stat"
CACHE = ("active_file", "inactive_file")
# The kernel reclaims most clean, unused page cache at once; some of it is mapped or under write-back.
RECLAIMABLE_SHARE = 0.8


def limited_groups(proc: Path, cgroup: Path = CGROUP) -> list[Path]:
    """The folders of this process's group and its ancestors that can have a limit, the innermost first. Within a container its own group is
    the mount's root."""
    lines = (_read(proc / "self" / "cgroup") or "").splitlines()
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    if path is None:
        return []
    folder = cgroup / path.strip("/")
    return [group for group in (folder, *folder.parents) if group.is_relative_to(cgroup) and (group / LIMIT).exists()]


def limit_bytes(proc: Path, cgroup: Path = CGROUP) -> int | None:
    """The smallest limit of this process's group and its ancestors. None without one."""
    limits = [_count(group / LIMIT) for group in limited_groups(proc, cgroup)]
    return min((limit for limit in limits if limit is not None), default=None)


def left_bytes(proc: Path, cgroup: Path = CGROUP) -> int | None:
    """Bytes that are left in the tightest of them. None without a limit."""
    found = [_left_of(group) for group in limited_groups(proc, cgroup)]
    return min((left for left in found if left is not None), default=None)


def left_of(limit: int, used: int, cache: int) -> int:
    """Bytes that a group may still take. Its page cache counts as free, as far as the kernel gives it back at once."""
    return max(0, limit - used + int(RECLAIMABLE_SHARE * cache))


def _left_of(group: Path) -> int | None:
    limit, used = _count(group / LIMIT), _count(group / USED)
    if limit is None or used is None:
        return None
    stat = dict(line.split() for line in (_read(group / STAT) or "").splitlines())
    return left_of(limit, used, sum(int(stat.get(name, 0)) for name in CACHE))


def _count(path: Path) -> int | None:
    """None for `max`, and where the file cannot be read."""
    text = _read(path) or ""
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
