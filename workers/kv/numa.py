"""Owns the NUMA nodes that this process takes its memory from, and their readings. Never binds anything: vLLM's CPU backend does.

vLLM binds a worker's memory to the node of its CPUs (VLLM_CPU_OMP_THREADS_BIND; csrc/cpu/utils.cpp: numa_set_membind), and a container may
be restricted to some nodes (cpuset.mems). The process cannot use the memory of other nodes then.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from workers.host.meminfo import parse_fields

NODES = Path("/sys/devices/system/node")
# Numbers of the system call get_mempolicy(2) by machine: glibc has no function for it.
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_MASK_BITS = 1024
# include/uapi/linux/mempolicy.h: modes that take memory from their nodes only; flags are in the high bits.
_BIND, _INTERLEAVE, _WEIGHTED_INTERLEAVE = 2, 3, 6
_MODE = 0xFF
_FILES = ("Active(file)", "Inactive(file)")


@dataclass(frozen=True, slots=True)
class NumaMemory:
    """Memory of some NUMA nodes in bytes, with the meanings of /proc/meminfo; reclaimable: page cache of files."""

    total: int
    available: int
    free: int
    reclaimable: int


def policy() -> frozenset[int] | None:
    """The NUMA nodes that the memory of this thread and of threads it starts is bound to; None where it is not bound or unknown."""
    number = _GET_MEMPOLICY.get(platform.machine())
    if number is None:
        return None
    mode, mask = ctypes.c_int(0), (ctypes.c_ulong * (_MASK_BITS // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    if ctypes.CDLL(None).syscall(number, ctypes.byref(mode), mask, ctypes.c_ulong(_MASK_BITS), None, 0) != 0:
        return None  # a container's seccomp filter: it refuses the binding too
    if mode.value & _MODE not in (_BIND, _INTERLEAVE, _WEIGHTED_INTERLEAVE):
        return None
    width = 8 * ctypes.sizeof(ctypes.c_ulong)
    return frozenset(node for node in range(_MASK_BITS) if mask[node // width] >> node % width & 1)


def nodes_bound(proc: Path, nodes: Path = NODES, bound: Callable[[], frozenset[int] | None] = policy) -> frozenset[int] | None:
    """The NUMA nodes that this process's memory comes from; None for all nodes of the machine."""
    there = frozenset(node for node, _ in _each(nodes))
    allowed, held = _allowed(proc), bound()
    usable = there if allowed is None else there & allowed
    usable = usable if held is None else usable & held
    return usable if usable and usable != there else None


def memory_of(wanted: frozenset[int], whole: Mapping[str, int], nodes: Path = NODES) -> NumaMemory | None:
    """The sums of these nodes; None where a node lacks a number. whole: the fields of /proc/meminfo (parse_fields).

    A node has no MemAvailable of its own. The kernel's is free memory, page cache and reclaimable slabs, minus watermarks and half of the
    smaller amounts (mm/show_mem.c, si_mem_available): each node gets its proportional part of that deduction.
    """
    nodes_kept = [fields for node, fields in _each(nodes) if node in wanted]
    if len(nodes_kept) != len(wanted) or not all({"MemTotal", "MemFree"} <= fields.keys() for fields in nodes_kept):
        return None
    total, free = (sum(fields[name] for fields in nodes_kept) for name in ("MemTotal", "MemFree"))
    files = sum(fields.get(name, 0) for fields in nodes_kept for name in _FILES)
    less = max(0, _could_be(whole) - whole.get("MemAvailable", 0))
    share = total / max(1, whole.get("MemTotal", total))
    available = sum(map(_could_be, nodes_kept)) - int(less * share)
    return NumaMemory(total, max(0, min(available, whole.get("MemAvailable", available))), free, files)


def _could_be(fields: Mapping[str, int]) -> int:
    slabs = fields.get("KReclaimable", fields.get("SReclaimable", 0))
    return fields.get("MemFree", 0) + sum(fields.get(name, 0) for name in _FILES) + slabs


def _each(nodes: Path) -> Iterator[tuple[int, dict[str, int]]]:
    """Every node with memory, and its meminfo: lines such as `Node 0 MemFree:  13127376 kB` (drivers/base/node.c)."""
    for folder in sorted(nodes.glob("node[0-9]*")):
        try:
            text = (folder / "meminfo").read_text()
        except OSError:
            continue
        fields = parse_fields("\n".join(line.partition(" ")[2].partition(" ")[2] for line in text.splitlines()))
        if fields.get("MemTotal", 0):
            yield int(folder.name[4:]), fields


def _allowed(proc: Path) -> frozenset[int] | None:
    """Mems_allowed_list of /proc/self/status: `0-1,4`."""
    try:
        lines = (proc / "self" / "status").read_text().splitlines()
    except OSError:
        return None
    ranges = next((line.partition(":")[2].strip() for line in lines if line.startswith("Mems_allowed_list:")), "")
    numbers: set[int] = set()
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            return None
        numbers |= set(range(int(first), int(last or first) + 1))
    return frozenset(numbers) or None
