"""The section `memory`: how often memory is read, what stays free, and the guard's limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from sparkd.config.fields import Gib, PositiveSeconds, Section, no_bool
from sparkd.units import GIB

if TYPE_CHECKING:
    from workers.host.memory_limits import MemoryLimits


def _on_or_off(value: Any) -> Any:
    """YAML 1.1 reads `on` and `off` as true and false."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


class MemorySettings(Section):
    """How often memory is read, what stays free, and when the guard acts."""

    sample_s: Annotated[PositiveSeconds, Field(ge=0.05, le=60)] = 0.5
    guard: Annotated[Literal["on", "watch", "off"], BeforeValidator(_on_or_off)] = "on"
    soft_gib: Gib | Literal["auto"] = "auto"
    hard_gib: Gib | Literal["auto"] = "auto"
    floor_gib: Gib | Literal["auto"] = "auto"
    os_reserve_gib: Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=1e6)] | Literal["auto"] = "auto"

    @model_validator(mode="after")
    def _in_order(self) -> MemorySettings:
        limits = [limit for limit in (self.floor_gib, self.hard_gib, self.soft_gib) if limit != "auto"]
        if limits != sorted(limits):
            raise ValueError("floor_gib must be at most hard_gib, and that at most soft_gib")
        return self

    def guard_settings(self) -> dict[str, Any]:
        """The guard's settings, in the form of workers.guard.guard.Guard."""
        return {"mode": self.guard} | self._limits_gib()

    def limits(self, mem_total_bytes: int) -> MemoryLimits:
        """The guard's, on a node with so much memory."""
        from workers.host.memory_limits import MemoryLimits

        return MemoryLimits.of(mem_total_bytes, **self._limits_gib())

    def _limits_gib(self) -> dict[str, float | None]:
        limits = {"soft_gib": self.soft_gib, "hard_gib": self.hard_gib, "floor_gib": self.floor_gib}
        return {name: None if limit == "auto" else limit for name, limit in limits.items()}

    def os_reserve_bytes(self, mem_total_bytes: int) -> int:
        """The bytes that stay free for the system. auto: 7 GiB on a Spark, whose host stalls rather than swaps, and a tenth on less than 70
        GiB."""
        if self.os_reserve_gib == "auto":
            return min(7 * GIB, mem_total_bytes // 10)
        return int(self.os_reserve_gib * GIB)
