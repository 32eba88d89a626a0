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
        self.path.write_text('#!/bin/sh\necho "$$ $*" >> "$0.starts"\n. "$0.does"\n')
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
        file = Path(f"{self.path}.starts")
        rows = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [(int(pid), arguments) for pid, *arguments in rows]

    @property
    def living(self) -> list[Identity]:
        found = (processes.identity(pid) for pid, _ in self.starts)
        return [process for process in found if process is not None]

    def _replace(self, name: str, text: str) -> None:
        made = Path(f"{self.path}.new")
        made.write_text(text)
        made.rename(f"{self.path}.{name}")
