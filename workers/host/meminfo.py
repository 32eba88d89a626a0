"""Reads the machine's memory and its pressure into plain numbers, control groups' limits included.

psutil has neither the lines by which the driver's memory is found, nor CMA, pressure or control groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from workers.host.cgroups import limits

PROC = Path("/proc")

_FIELDS = {
    "MemTotal": "mem_total_bytes",
    "MemAvailable": "mem_available_bytes",
    "MemFree": "mem_free_bytes",
    "Cached": "cached_bytes",
    "SwapTotal": "swap_total_bytes",
    "SwapFree": "swap_free_bytes",
    "CmaTotal": "cma_total_bytes",
    "CmaFree": "cma_free_bytes",
}
_ALWAYS = ("mem_total_bytes", "mem_available_bytes", "mem_free_bytes", "cached_bytes", "swap_total_bytes", "swap_free_bytes")


def parse_meminfo(text: str) -> dict[str, int]:
    """Bytes by the field names of sparkd.state.nouns.Reading; Cma fields only where the kernel prints them."""
    return _named(parse_fields(text))


def _named(fields: Mapping[str, int]) -> dict[str, int]:
    return dict.fromkeys(_ALWAYS, 0) | {name: fields[kernel] for kernel, name in _FIELDS.items() if kernel in fields}


def parse_fields(text: str) -> dict[str, int]:
    """Every line of /proc/meminfo by the kernel's own name: bytes, and plain counts where the line has no unit."""
    sizes: dict[str, int] = {}
    for line in text.splitlines():
        name, colon, rest = line.partition(":")
        words = rest.split()
        if colon and words and (count := count_of(words[0])) is not None:
            sizes[name.strip()] = count * (1024 if len(words) > 1 else 1)
    return sizes


def read_fields(proc: Path = PROC) -> dict[str, int]:
    """The fields of /proc/meminfo, see parse_fields. MemTotal and MemAvailable are at most what this process's control groups allow and
    leave.

    Only the guard reads the files differently: it holds them open. Raises OSError.
    """
    fields = parse_fields((proc / "meminfo").read_text())
    for limit, left in limits(proc):
        fields |= {"MemTotal": min(fields.get("MemTotal", 0), limit), "MemAvailable": min(fields.get("MemAvailable", 0), left)}
    return fields


def mem_total_bytes(proc: Path = PROC) -> int:
    """MemTotal or the smaller limit of a control group, 0 where the line is missing. Raises OSError where /proc/meminfo cannot be read."""
    return read_fields(proc).get("MemTotal", 0)


def mem_available_bytes(proc: Path = PROC) -> int:
    """MemAvailable, as mem_total_bytes."""
    return read_fields(proc).get("MemAvailable", 0)


def count_of(word: str) -> int | None:
    """A count as the kernel writes it; None for anything else."""
    return int(word) if word.isascii() and word.isdecimal() and len(word) < 20 else None


def unaccounted_bytes(fields: Mapping[str, int]) -> int | None:
    """Bytes that no line of /proc/meminfo accounts for: the driver's, so CUDA's too; 1.1 to 1.35 GiB on an idle Spark. None where lines are
    missing.

    Shmem is part of Cached, SReclaimable of KReclaimable. CUDA's memory is in no line: 12 GiB of cudaMalloc left Shmem unchanged.
    """
    if not {"MemTotal", "MemFree", "Cached", "AnonPages", "SUnreclaim"} <= fields.keys():
        return None
    reclaimable = next((fields[name] for name in RECLAIMABLE if name in fields), 0)
    return fields["MemTotal"] - reclaimable - sum(fields.get(name, 0) for name in ACCOUNTED)


# The first of these lines that the kernel prints counts.
RECLAIMABLE = ("KReclaimable", "SReclaimable")
ACCOUNTED = (
    "MemFree", "Buffers", "Cached", "SwapCached", "AnonPages", "SUnreclaim", "KernelStack", "PageTables", "SecPageTables", "Percpu",
)  # fmt: skip


def parse_pressure(text: str) -> dict[str, float]:
    """psi_some_avg10 and psi_full_avg10, percent of time (Documentation/accounting/psi.rst)."""
    shares: dict[str, float] = {}
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        for word in rest.split():
            name, _, value = word.partition("=")
            if name == "avg10" and kind in ("some", "full"):
                shares[f"psi_{kind}_avg10"] = float(value)
    return shares


def sample(proc: Path = PROC) -> dict[str, float]:
    """The values at this moment, without a time; no psi fields on a kernel without PSI. Raises OSError where /proc/meminfo is
    unreadable."""
    values: dict[str, float] = dict(_named(read_fields(proc)))
    try:
        values |= parse_pressure((proc / "pressure" / "memory").read_text())
    except OSError:
        pass
    return values
