"""A process that holds memory so that little of it remains: of the device where there is one, else of the host. Never takes the last of it.

    python -m tests.bench.kv_ballast [--floor BYTES]

Standard input: `hold BYTES` or `leave BYTES`, a line each; the answer is a line of JSON, {"held", "free", "total"}. It ends with its input.
Of the host's memory nothing is taken where MemAvailable would fall under --floor, and where others bring it there everything is given back.
"""

from __future__ import annotations

import argparse
import json
import mmap
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from tests.bench.child import ROOT

PIECE_BYTES = 128 * 2**20
LOOK_S = 0.1
MEMINFO = Path("/proc/meminfo")


def host_memory(name: str = "MemAvailable") -> int:
    """Bytes."""
    for line in MEMINFO.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{MEMINFO} has no {name}")


class Ballast:
    """The process, seen from the bench. Each verb answers {"held", "free", "total"}, bytes."""

    def __init__(self, floor: int) -> None:
        self._command = [sys.executable, "-m", "tests.bench.kv_ballast", "--floor", str(floor)]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.communicate()

    def hold(self, size: int) -> Mapping[str, int]:
        return self._ask(f"hold {size}")

    def leave(self, size: int) -> Mapping[str, int]:
        return self._ask(f"leave {size}")

    def _ask(self, line: str) -> Mapping[str, int]:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("The ballast has no pipes.")
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline()
        if not said:
            raise SystemExit("The ballast process has ended; its own error is above.")
        found: dict[str, int] = json.loads(said)
        return found


class Memory(Protocol):
    total: int

    @property
    def held(self) -> int: ...

    def free(self) -> int: ...

    def hold(self, size: int) -> None: ...

    def look(self) -> None: ...


class Host:
    """Anonymous pages that are really there."""

    def __init__(self, floor: int) -> None:
        self.total = host_memory("MemTotal")
        self._floor = floor
        self._pieces: list[mmap.mmap] = []

    @property
    def held(self) -> int:
        return sum(len(piece) for piece in self._pieces)

    def free(self) -> int:
        return host_memory()

    def hold(self, size: int) -> None:
        while self.held > max(size, 0):
            self._pieces.pop().close()
        while (missing := (size - self.held) // mmap.PAGESIZE * mmap.PAGESIZE) > 0:
            piece = min(PIECE_BYTES, missing)
            if self.free() - piece < self._floor:
                return
            self._pieces.append(mmap.mmap(-1, piece, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE))

    def look(self) -> None:
        if self._pieces and self.free() < self._floor:
            print(f"the ballast gives its {self.held / 2**30:.1f} GiB back: too little is left to others", file=sys.stderr, flush=True)
            self.hold(0)


class Device:
    """One tensor of the current CUDA device."""

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch
        self._tensor: Any = None
        self.held = 0
        self.total = int(torch.cuda.mem_get_info()[1])

    def free(self) -> int:
        return int(self._torch.cuda.mem_get_info()[0])

    def hold(self, size: int) -> None:
        self._tensor, self.held = None, 0
        self._torch.cuda.empty_cache()
        if size > 0:
            self._tensor = self._torch.empty(size, dtype=self._torch.uint8, device="cuda")
            self.held = size

    def look(self) -> None:
        """A full device refuses; it takes nothing from others."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--floor", type=int, default=0, help="bytes of the host's memory that always remain")
    memory = _memory(parser.parse_args().floor)
    while True:
        if not select.select([sys.stdin], [], [], LOOK_S)[0]:
            memory.look()
            continue
        # One line is sent at a time and answered before the next, so nothing waits in Python's buffer.
        line = sys.stdin.readline()
        if not line:
            return
        verb, size = line.split()
        if verb == "leave":
            # Twice: what others did meanwhile, and what freeing gave back late.
            for _ in range(2):
                memory.hold(memory.held + memory.free() - int(size))
        else:
            memory.hold(int(size))
        print(json.dumps({"held": memory.held, "free": memory.free(), "total": memory.total}), flush=True)


def _memory(floor: int) -> Memory:
    try:
        import torch

        return Device() if torch.cuda.is_available() else Host(floor)
    except ImportError:
        return Host(floor)


if __name__ == "__main__":
    main()
