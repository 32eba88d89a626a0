"""Owns how the memory of an engine that ended comes back to its node, and what may be loaded there meanwhile. Pure: reads nothing.

MemAvailable counts page cache that the kernel would give back, so a cache that grows meanwhile changes nothing here. The memory of living
engines is added to it. So an engine that loads there meanwhile does not look like missing memory, and one that ends not like memory that is
back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from workers.host.memory_limits import MemoryLimits

GIB = 1 << 30
# So much of it counts as all of it.
SHARE = 0.9
SLACK_BYTES = GIB // 2
# Memory that rises by less than that within that time has stopped to. 58 GiB that take a minute rise by 3 GiB meanwhile.
FLAT_BYTES, FLAT_S = GIB // 8, 3.0


@dataclass(frozen=True, slots=True)
class NodeSample:
    """One node at one moment, bytes. living: what the engines that live there hold together; unaccounted: see Reading."""

    at_s: float
    available: int
    living: int = 0
    unaccounted: int | None = None


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The bytes that one rank held at one look at its node, `device` of them on the device."""

    look: NodeSample
    bytes: int
    device: int = 0


def last_held(looks: Iterable[RankMemory]) -> RankMemory | None:
    """The look that shows how much memory a rank's end gives back: the latest before the rank began to end.

    looks: those shortly before the end. Compilers and staging of a load are gone long before, so the rank's peak does not count.
    """
    all_looks = tuple(looks)
    most = max((look.bytes for look in all_looks), default=0)
    return next((look for look in reversed(all_looks) if look.bytes >= SHARE * most), None)


@dataclass(slots=True)
class Returning:
    """held: bytes of a rank that ended at since_s. whole: what was available or held by living engines on its node just before.

    missing: bytes that have not come back. It never grows: memory that was back counts as back, whatever takes it then.
    """

    held: int
    whole: int
    since_s: float
    missing: int = -1
    _looks: deque[NodeSample] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.missing = self.held

    def look(self, look: NodeSample) -> None:
        """Take in what the node shows now."""
        self.missing = min(self.missing, max(0, self.whole - look.available - look.living))
        self._looks.append(look)
        while len(self._looks) > 1 and self._looks[1].at_s <= look.at_s - FLAT_S:
            self._looks.popleft()

    @property
    def is_back(self) -> bool:
        return self.missing <= (1 - SHARE) * self.held + SLACK_BYTES

    @property
    def rests(self) -> bool:
        """Whether memory has stopped to come back, for now."""
        if not self._looks or self._looks[-1].at_s - self._looks[0].at_s < FLAT_S:
            return False
        first, last = self._looks[0], self._looks[-1]
        return last.available + last.living - first.available - first.living <= FLAT_BYTES

    def room(self, limits: MemoryLimits) -> int:
        """Bytes that a load may need if it begins now: what is available, less the guard's soft limit, and once memory has stopped to rise
        less its hard one."""
        available = self._looks[-1].available if self._looks else 0
        return max(0, available - (limits.hard if self.rests else limits.soft))
