"""One node as the doctor sees it: typed looks at what workers.host.inspection.sample read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sparkd.fabric.checks import OK, Finding
from workers.guard.gpu_meter import number_of, words_of
from workers.host.meminfo import count_of, parse_fields

# As workers.host.inspection asks for them.
GPU_WORDS = ("name", "driver_version", "utilization.gpu", "power.draw", "clocks.current.sm", "clocks.max.sm")
SPARK = re.compile(r"\bGB10\b")


class Host:
    """
    name: of the node.
    raw: the plain JSON of that sample.
    """

    def __init__(self, name: str, raw: Mapping[str, Any]) -> None:
        self.name = name
        self.raw = raw
        self._files: Mapping[str, str] = raw.get("files") or {}
        self.meminfo = parse_fields(self.text("proc/meminfo"))
        # name, driver, utilization, power, SM clock, its maximum: of the first GPU. Empty where nvidia-smi names none.
        words = words_of(self.program("nvidia-smi")["text"].partition("\n")[0])
        self.gpu = words if len(words) == len(GPU_WORDS) and words[0] else []

    def text(self, path: str) -> str:
        """One of FILES of workers.host.inspection. Empty where the node has no such file."""
        return self._files.get(path, "")

    def number(self, path: str) -> int | None:
        return count_of(self.text(path).strip())

    def has(self, *paths: str) -> bool:
        """Whether one of these PATHS of workers.host.inspection is there."""
        return any(path in self.raw.get("paths", ()) for path in paths)

    def program(self, name: str) -> Mapping[str, Any]:
        """The answer of a program: `text`; `trouble`, why there is no answer, or None; whether the program has `hung` or is `missing`."""
        answer: Mapping[str, Any] = self.raw["commands"][name]
        return answer

    @property
    def is_spark(self) -> bool:
        """A GB10, of whichever maker: the names in DMI differ, that of the GPU does not."""
        named = f"{''.join(self.gpu[:1])} {self.text('sys/class/dmi/id/product_name')} {self.text('etc/dgx-release')}"
        return bool(SPARK.search(named) or "DGX_Spark" in named or "DGX Spark" in named)

    @property
    def total_bytes(self) -> int:
        return self.meminfo.get("MemTotal", 0)

    def gpu_number(self, index: int) -> float | None:
        """Utilization in percent (2), watts (3), MHz (4, 5); None where nvidia-smi says [N/A]."""
        return number_of(self.gpu[index]) if index < len(self.gpu) else None

    def find(self, check: str, verdict: str, about: str, evidence: str, cure: str = "", command: str | None = None) -> Finding:
        return Finding(check, verdict, self.name, about, evidence, cure, command)

    def fine(self, check: str, about: str, evidence: str, cure: str = "", command: str | None = None) -> Finding:
        return self.find(check, OK, about, evidence, cure, command)
