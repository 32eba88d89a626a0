"""Kinds of machine to plan for: memory, bandwidths, what the system itself takes. This machine is not looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from sparkd.errors import ConfigError, clause
from sparkd.units import GIB

_Bytes = Annotated[int, Field(ge=0)]
_Rate = Annotated[float, Field(gt=0)] | None
# On unified memory: 16 to 22 compilers at once have frozen nodes (logs of owners), and every one takes from the engine.
JIT_CAPS = {"MAX_JOBS": "2", "FLASHINFER_NVCC_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Hardware:
    """One node. Sizes are bytes, rates bytes a second; a rate that is None is not known.

    unified: whether the device's memory is the host's.
    system_bytes: held by the operating system and its services.
    link_*: between two nodes, one way.
    learned: the rates that a bench measured on this node, by name.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    memory_bytes: _Bytes
    unified: bool
    system_bytes: _Bytes
    bandwidth_bytes_s: _Rate
    disk_bytes_s: _Rate
    link_bytes_s: _Rate
    link_latency_s: _Rate
    platform: Annotated[str, Field(pattern="^(cuda|cpu)$")] = "cuda"
    learned: tuple[str, ...] = ()


# MemTotal of a Spark with a 2026 firmware; 4 GiB are what a headless one holds at rest, desktop off (/proc/meminfo captures of four
# owners: 3 to 5 GiB). 273 GB/s: data sheet, 240 are reached. Disk: `dd` on a Lenovo GB10, 3.9 GB/s. Link: all_reduce of NCCL over both
# twins of one cable, 20.5 GB/s, and 30 us for the few KiB of one token (NVIDIA's playbooks, logs of owners).
SPARK = Hardware("spark", 127_535_224 * 1024, True, 4 * GIB, 273e9, 3.9e9, 20.5e9, 30e-6)
# 141 GB HBM3e at 4.8 TB/s (data sheet); the rest as measured on a rented one.
H200 = Hardware("h200", 139 * GIB, False, 0, 4.8e12, 2.2e9, 300e9, 10e-6)
KNOWN = {one.name: one for one in (SPARK, H200)}
# The rates of a machine that serves by its CPU are unknown: it may be a desktop or a server.
UNKNOWN_RATES: Mapping[str, Any] = dict.fromkeys(("bandwidth_bytes_s", "disk_bytes_s", "link_bytes_s", "link_latency_s"))


def machine(platform: str, memory_bytes: int, system_bytes: int) -> Hardware:
    """A node that is none of the known ones: on a GPU with a Spark's bandwidths."""
    node = replace(SPARK, name="node", memory_bytes=memory_bytes, system_bytes=system_bytes, platform=platform)
    return replace(node, **UNKNOWN_RATES) if platform == "cpu" else node


def hardware_of(text: str) -> Hardware:
    """`spark`, `h200`, or a YAML file with the fields of `Hardware`; what it leaves out is a Spark's, but for the rates of a CPU, which are
    not known then. Raises ConfigError."""
    if text in KNOWN:
        return KNOWN[text]
    path = Path(text)
    if not path.is_file():
        raise ConfigError(f"--hardware {text}: neither {' nor '.join(KNOWN)} nor a file; name one of them.", param="hardware")
    stated = _read(path)
    rates = UNKNOWN_RATES if stated.get("platform") == "cpu" else {}
    try:
        hardware = TypeAdapter(Hardware).validate_python({**asdict(SPARK), **rates, "name": path.stem, **stated})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = f"{'.'.join(map(str, first['loc']))} is {first['input']!r}: {clause(first['msg'])}"
        raise ConfigError(f"{path}: {reason}. Known keys: {', '.join(asdict(SPARK))}.", param="hardware") from None
    if hardware.system_bytes >= hardware.memory_bytes:
        problem = f"system_bytes {hardware.system_bytes} leaves nothing of memory_bytes {hardware.memory_bytes}; correct them"
        raise ConfigError(f"{path}: {problem}.", param="hardware")
    return hardware


def _read(path: Path) -> dict[str, object]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"{path}: {reason}; name a readable YAML file.", param="hardware") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'problem', None) or 'it is no YAML'}; a map is expected.", param="hardware") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a map with memory_bytes and the like is expected.", param="hardware")
    return values
