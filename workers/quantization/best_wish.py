"""The value `best` of `quantize`, with the memory goal that it may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.quantization.formats import refused

BEST = "best"
_MOST_GIB = 1 << 20


@dataclass(frozen=True, slots=True)
class BestWish:
    """`quantize: best`. gib: of the model's weights on all ranks together; None for what the memory leaves them."""

    gib: float | None = None

    @property
    def budget(self) -> int | None:
        """The same in bytes."""
        return None if self.gib is None else int(self.gib * (1 << 30))

    def canonical(self) -> dict[str, Any]:
        return {"format": BEST} | ({} if self.gib is None else {"gib": self.gib})


def best_of(value: Any) -> BestWish | None:
    """None for a `quantize` value of another format. Raises ConfigError for keys that `best` does not have."""
    settings = value if isinstance(value, Mapping) else {"format": value}
    if not isinstance(settings.get("format"), str) or settings["format"].strip().lower() != BEST:
        return None
    if unknown := sorted(str(key) for key in settings if key not in ("format", "gib")):
        raise refused(
            f"quantize.{unknown[0]}", "format: best chooses the format of every layer itself, and has no key but gib; leave it out"
        )
    gib = settings.get("gib")
    if gib is not None and (isinstance(gib, bool) or not isinstance(gib, int | float) or not 0 < gib < _MOST_GIB):
        raise refused("quantize.gib", f"{gib!r} is no size in GiB; write a number above 0")
    return BestWish(None if gib is None else float(gib))
