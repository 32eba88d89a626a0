"""Owns the advice for a model or cache that does not fit: keys of its entry, their spelling, and the largest number that fits.

A caller tries each cure against all of its limits, so that a restart with the cure is not refused. The engine uses its measurements
(workers.kv.arithmetic); a load, a check and a plan use the model's memory account (sparkd.capacity.advice).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from workers.kv.settings import BLOCKS_FLAG

GIB = 1 << 30
OTHER_PROGRAMS = "end other programs that use memory"


@dataclass(frozen=True, slots=True)
class Cure:
    """One way to make a model or cache fit. settings: keys of the model's entry with values that suffice; a cache size in blocks is a flag
    instead. effect: their effect, in words. deed: a further or other action, without a number."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    effect: str = ""
    deed: str = ""

    def __str__(self) -> str:
        settings = " and ".join(written(key, value) for key, value in self.settings.items())
        words = " and ".join(filter(None, (self.deed, settings and f"set {settings}")))
        return f"{words} ({self.effect})" if self.effect else words

    def also(self, settings: Mapping[str, Any]) -> Cure:
        return replace(self, settings={**self.settings, **settings})


def advised(cures: Iterable[Cure]) -> str:
    """The sentence that names the cures, without a full stop; empty without cures."""
    words = ", or ".join(map(str, cures))
    return f"To make it fit: {words}" if words else ""


def written(key: str, value: Any) -> str:
    """A setting in the entry's spelling."""
    if isinstance(value, Mapping):
        return f"{BLOCKS_FLAG} {value['blocks']}" if "blocks" in value else f"{key}: {spelled(value)}"
    return f"{key}: {str(value).lower() if isinstance(value, bool) else value}"


def spelled(size: Mapping[str, Any]) -> str:
    """The size of a cache in the entry's spelling, which is parsed to the same size."""
    told = (f"{key}: {_bytes(value) if key == 'bytes' else value}" for key, value in size.items())
    return f"{{{', '.join(told)}}}"


def most_written(least: int, most: int) -> int:
    """The largest size from `least` to `most` bytes in tenths of a GiB, in whole MiB where there is none, or else in bytes."""
    sizes = (int(most * 10 // GIB / 10 * GIB), most >> 20 << 20, most)
    return next(size for size in sizes if least <= size <= most)


def least_written(least: int, most: int) -> int:
    """The smallest size from `least` to `most` bytes, rounded like `most_written`; `least` where `most` is smaller."""
    sizes = (int(-(-least * 10 // GIB) / 10 * GIB), -(-least >> 20) << 20)
    return next((size for size in sizes if size <= most), least)


def largest(fits: Callable[[int], bool], most: int, step: int = 1) -> int:
    """`most`, or the largest multiple of `step` below it that fits, by bisection; 0, which is not tested, where none fits."""
    if most > 0 and fits(most):
        return most
    low, high = 0, (most - 1) // step
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle - 1)
    return low * step


def _bytes(size: int) -> str:
    tenths = f"{size / GIB:.1f}".removesuffix(".0")
    if int(float(tenths) * GIB) == size:
        return f"{tenths}GiB"
    return str(size) if size % (1 << 20) else f"{size >> 20}MiB"
