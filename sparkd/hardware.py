"""Owns what kinds of machine there are to plan for: memory, bandwidths, what the system itself takes. Never looks at this machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sparkd.errors import ConfigError
from sparkd.units import GIB

# On unified memory: 16 to 22 compilers at once have frozen nodes (logs of owners), and every one takes from the engine.
JIT_CAPS = {"MAX_JOBS": "2", "FLASHINFER_NVCC_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Hardware:
    """One node. Bytes and bytes a second; unified: the device's memory is the host's. link_*: between two nodes, one way.

    system_bytes: what the operating system and its services hold. platform: cuda or cpu. A rate that is None is not known.
    learned: the rates that a bench measured on this node, by name.
    """

    name: str
    memory_bytes: int
    unified: bool
    system_bytes: int
    bandwidth_bytes_s: float | None
    disk_bytes_s: float | None
    link_bytes_s: float | None
    link_latency_s: float | None
    platform: str = "cuda"
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


def hardware_of(text: str) -> Hardware:
    """`spark`, `h200`, or a YAML file with the fields of `Hardware`; what it leaves out is a Spark's, but for the rates of a CPU, which are
    not known then. Raises ConfigError."""
    if text in KNOWN:
        return KNOWN[text]
    path = Path(text)
    if not path.is_file():
        raise ConfigError(f"--hardware {text}: neither {' nor '.join(KNOWN)} nor a file; name one of them.", param="hardware")
    stated = _read(path)
    names = {field.name: field.type for field in fields(Hardware) if field.name != "learned"}
    if unknown := sorted(set(map(str, stated)) - names.keys()):
        raise ConfigError(f"{path}: the key {unknown[0]!r} is not known; {', '.join(names)} are.", param="hardware")
    values: dict[str, Any] = {name: getattr(SPARK, name) for name in names} | {"name": path.stem}
    values |= UNKNOWN_RATES if stated.get("platform") == "cpu" else {}
    for name, value in stated.items():
        kind = type(getattr(SPARK, name))
        if not _is_a(kind, value) or (name == "platform" and value not in ("cuda", "cpu")):
            raise ConfigError(f"{path}: {name} must be {_WORDS[kind]}, not {value!r}.", param="hardware")
        values[name] = kind(value)
    if values["system_bytes"] >= values["memory_bytes"]:
        problem = f"system_bytes {values['system_bytes']} leaves nothing of memory_bytes {values['memory_bytes']}; correct them"
        raise ConfigError(f"{path}: {problem}.", param="hardware")
    return Hardware(**values)


def _is_a(expected: type, value: object) -> bool:
    if expected not in (int, float):
        return isinstance(value, expected)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    return value >= 0 and value == int(value) if expected is int else value > 0


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


_WORDS = {int: "a whole number", float: "a number above 0", bool: "true or false", str: "a word (platform: cuda or cpu)"}
