"""Memory limits of control groups: both versions, alone, together, and as a container sees them."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.kv.cgroups import cgroup_left
from workers.kv.memory import host

# What kernels write where there is no limit: PAGE_COUNTER_MAX of 4 KiB and of 64 KiB pages.
NONE, NONE_64K = "9223372036854771712", "9223372036854710272"
# (limit, used); of each group's page cache 0.8 of 100 bytes count as room.
Group = tuple[str, int]


def v1(folder: Path, group: Group, hierarchy: str = "1") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{group[0]}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{group[1]}\n")
    (folder / "memory.use_hierarchy").write_text(f"{hierarchy}\n")
    # Its own cache, and that of the groups below it too.
    (folder / "memory.stat").write_text("active_file 6\ninactive_file 4\ntotal_active_file 60\ntotal_inactive_file 40\n")


def v2(folder: Path, group: Group) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{group[0]}\n")
    (folder / "memory.current").write_text(f"{group[1]}\n")
    (folder / "memory.stat").write_text("anon 5\nfile 100\nactive_file 60\ninactive_file 40\n")


def proc(tmp_path: Path, cgroup: str, mounts: str = "") -> Path:
    """Paths in `mounts` begin with ROOT."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(cgroup)
    if mounts:
        (tmp_path / "proc" / "self" / "mountinfo").write_text(mounts.replace("ROOT", str(tmp_path / "sys")))
    return tmp_path / "proc"


V1_LINES = "12:pids:/x\n4:memory:{}\n1:name=systemd:/x\n"
V1_MOUNTS = (
    "31 23 0:28 / ROOT rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "34 31 0:31 {} ROOT/cpuset rw,relatime - cgroup cgroup rw,cpuset\n"
    "35 31 0:32 {} ROOT/memory rw,relatime shared:9 master:1 - cgroup cgroup rw,memory\n"
)


@pytest.mark.parametrize(
    ("groups", "left"),
    [
        ({"a": ("700", 650), "a/b": ("1000", 400)}, 50 + 80),  # the tightest of those above
        ({"": (NONE, 9000), "a": (NONE_64K, 650), "a/b": (NONE, 400)}, None),
        ({"a/b": ("1000", 4000)}, 0),
    ],
)
def test_a_limit_of_version_1(tmp_path, groups, left):
    for folder, group in groups.items():
        v1(tmp_path / "sys" / "memory" / folder, group)
    assert cgroup_left(proc(tmp_path, V1_LINES.format("/a/b"), V1_MOUNTS.format("/", "/")), tmp_path / "nowhere") == left
    # Without a list of mounts, where it usually is.
    assert cgroup_left(proc(tmp_path / "bare", V1_LINES.format("/a/b")), tmp_path / "sys") == left


def test_a_group_without_hierarchy_does_not_count_those_below_it(tmp_path):
    v1(tmp_path / "sys" / "memory" / "a", ("300", 290), hierarchy="0")
    v1(tmp_path / "sys" / "memory" / "a" / "b", ("1000", 400), hierarchy="0")
    assert cgroup_left(proc(tmp_path, V1_LINES.format("/a/b")), tmp_path / "sys") == 680


def test_a_container_of_version_1_finds_its_own_group_at_the_root_of_the_mount(tmp_path):
    """docker without a cgroup namespace: /proc/self/cgroup has the host's path, and the mount begins there."""
    v1(tmp_path / "sys" / "memory", ("1000", 400))
    v1(tmp_path / "sys" / "memory" / "c", ("500", 400))
    found = proc(tmp_path, V1_LINES.format("/docker/4711/c"), V1_MOUNTS.format("/docker/4711", "/docker/4711"))
    assert cgroup_left(found, tmp_path / "nowhere") == 180


HYBRID = V1_MOUNTS.format("/", "/") + "41 31 0:38 / ROOT/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.mark.parametrize(
    ("first", "second", "left"),
    [
        (("1000", 400), None, 680),  # the memory controller is in version 1, as systemd's hybrid layout has it
        (("1000", 400), ("900", 400), 580),
        ((NONE, 400), ("max", 400), None),
    ],
)
def test_both_versions_hold_where_a_host_has_both(tmp_path, first, second, left):
    v1(tmp_path / "sys" / "memory" / "a", first)
    (tmp_path / "sys" / "unified" / "u").mkdir(parents=True)
    if second:
        v2(tmp_path / "sys" / "unified" / "u", second)
    found = proc(tmp_path, V1_LINES.format("/a") + "0::/u\n", HYBRID)
    assert cgroup_left(found, tmp_path / "nowhere") == left


def test_a_file_that_is_no_number_is_no_limit(tmp_path):
    v1(tmp_path / "sys" / "memory" / "a", ("much", 400))
    assert cgroup_left(proc(tmp_path, V1_LINES.format("/a")), tmp_path / "sys") is None


def test_a_reading_has_it(tmp_path):
    v1(tmp_path / "sys" / "memory" / "a", ("1000", 400))
    found = proc(tmp_path, V1_LINES.format("/a"))
    (found / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 90 kB\nMemFree: 80 kB\n")
    assert (host(found, tmp_path / "sys").cgroup_left, host(found, tmp_path / "sys").room) == (680, 680)
