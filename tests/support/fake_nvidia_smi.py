"""An nvidia-smi whose answers a test writes: put on PATH, it notes each of its starts and runs what stands in its file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from workers.guard import gpu_meter
from workers.host import processes
from workers.host.processes import Identity

ROW = "120.40, 97, 41, 1980, 0x0000000000000000, NVIDIA GB10"


class FakeNvidiaSmi:
    """In `folder`, which stands before all others on PATH. `does` is shell; `$0.rows` is the file of `rows`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = folder / gpu_meter.PROGRAM
        self.path.write_text('#!/bin/sh\nread -r stat < "/proc/$$/stat"\necho "$stat|$*" >> "$0.starts"\n. "$0.does"\n')
        self.path.chmod(0o700)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def does(self, shell: str) -> None:
        self._replace("does", shell)

    def prints(self, *rows: str) -> None:
        """These rows again and again, a moment apart."""
        self._replace("rows", "".join(f"{row}\n" for row in rows))
        self.does('while :; do cat "$0.rows"; sleep 0.1; done')

    @property
    def starts(self) -> list[tuple[int, list[str]]]:
        """(pid, arguments) of each start."""
        return [(pid, arguments) for pid, _, arguments in self._noted()]

    @property
    def living(self) -> list[Identity]:
        """Those that have not ended. Another process may have the pid of one that has."""
        found = ((processes.identity(pid), start_ticks) for pid, start_ticks, _ in self._noted())
        return [process for process, start_ticks in found if process is not None and process.start_ticks == start_ticks]

    def _noted(self) -> list[tuple[int, int, list[str]]]:
        """(pid, start_ticks, arguments) of each start."""
        file = Path(f"{self.path}.starts")
        rows = [line.partition("|") for line in file.read_text().splitlines()] if file.exists() else []
        return [(int(stat.split()[0]), int(stat.rpartition(")")[2].split()[19]), words.split()) for stat, _, words in rows]

    def _replace(self, name: str, text: str) -> None:
        made = Path(f"{self.path}.new")
        made.write_text(text)
        made.rename(f"{self.path}.{name}")
