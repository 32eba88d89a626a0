"""The memory limit of a container, unit or slice, as everything sees it that asks for the machine's memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from workers.guard.memory_sampler import MemorySampler
from workers.host.meminfo import read_fields
from workers.kv.memory import host

MACHINE = (100 * 1024, 90 * 1024)
# memory.max and memory.current of each group, of which 100 bytes come back.
LIMITS: Mapping[str, tuple[str, Mapping[str, tuple[str, str]], tuple[int, int]]] = {
    "the tightest of those above": ("a/b", {"a": ("700", "650"), "a/b": ("1000", "400")}, (700, 50 + 100)),
    "more is held than is allowed": ("a/b", {"a/b": ("1000", "4000")}, (1000, 0)),
    "no limit": ("a/b", {"a/b": ("max", "400")}, MACHINE),
    "more than the machine has": ("a/b", {"a/b": (str(1 << 40), "400")}, MACHINE),
    "a container, in which its group is the root": ("not/here", {"": ("700", "650")}, (700, 50 + 100)),
    "a group that has gone": ("gone", {}, MACHINE),
}


@pytest.mark.parametrize(("path", "limits", "seen"), LIMITS.values(), ids=LIMITS)
def test_the_least_of_the_machine_and_its_control_groups_counts(
    tmp_path: Path, path: str, limits: Mapping[str, tuple[str, str]], seen: tuple[int, int]
) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "sys" / "fs" / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(f"12:cpuset:/\n0::/{path}\n")
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 90 kB\nMemFree: 90 kB\n")
    for folder, (limit, used) in limits.items():
        (groups / folder).mkdir(parents=True, exist_ok=True)
        (groups / folder / "memory.max").write_text(f"{limit}\n")
        (groups / folder / "memory.current").write_text(f"{used}\n")
        (groups / folder / "memory.stat").write_text("active_file 50\ninactive_file 40\nslab_reclaimable 10\nslab 99\n")

    fields, sizing, guard = read_fields(proc), host(proc), MemorySampler(proc).look(1.0)

    assert guard is not None
    assert (fields["MemTotal"], fields["MemAvailable"]) == (sizing.size, sizing.room) == (guard.total, guard.available) == seen


def test_where_version_2_is_not_mounted_there_is_no_limit(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("4:memory:/box\n")
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\n")
    assert read_fields(tmp_path) == {"MemTotal": MACHINE[0]}
