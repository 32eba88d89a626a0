"""Reads the memory limits of this process's control groups (version 2), and what they leave.

Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

from pathlib import Path

# In each group's folder: its limit, what it holds, and of what.
FILES = ("memory.max", "memory.current", "memory.stat")
# The kernel takes these back before it refuses the group a page. MemAvailable counts the same of the machine (mm/show_mem.c).
_RECLAIMED = ("active_file ", "inactive_file ", "slab_reclaimable ")


def limited_groups(proc: Path) -> list[Path]:
    """The folders of this process's group and its ancestors that can have a limit, the innermost first. Within a container its own group is
    the mount's root. /sys is beside proc."""
    lines = _read(proc / "self" / "cgroup").splitlines()
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    if path is None:
        return []
    cgroup = proc.parent / "sys" / "fs" / "cgroup"
    folder = cgroup / path.strip("/")
    return [group for group in (folder, *folder.parents) if group.is_relative_to(cgroup) and (group / FILES[0]).exists()]


def limits(proc: Path) -> list[tuple[int, int]]:
    """See limit_of, for each of this process's groups that has a limit."""
    of_groups = (limit_of(*(_read(group / name) for name in FILES)) for group in limited_groups(proc))
    return [limit for limit in of_groups if limit is not None]


def limit_of(limit: str, used: str, stat: str) -> tuple[int, int] | None:
    """Bytes that a group allows and that it leaves, from the texts of FILES. None without a limit, which is `max`, and where a file could
    not be read."""
    if not (limit.strip().isdecimal() and used.strip().isdecimal()):
        return None
    reclaimed = sum(int(line.split()[1]) for line in stat.splitlines() if line.startswith(_RECLAIMED))
    return int(limit), max(0, int(limit) - int(used) + reclaimed)


def _read(path: Path) -> str:
    """Empty where the file cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
