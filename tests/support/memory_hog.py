"""A process that takes memory, and a /proc/meminfo that shows what it takes times SCALE: a Spark's collapse in some hundred megabytes.

    python -m tests.support.memory_hog FOLDER FIRST_GIB LAST_GIB SECONDS

Takes what is between first and last of MemAvailable within that time, holds it until it is killed, and gives all back with its end, as the
file that `show` writes then says.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tests.support.waiting import HUNG_S

GIB = 1 << 30
SCALE = 32
STEP_S = 0.02
TOTAL_KIB = 127_535_272
PSI = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"


def show(folder: Path, available_gib: float) -> None:
    """Renamed into place, as a read of /proc is whole too."""
    (folder / "pressure").mkdir(parents=True, exist_ok=True)
    (folder / "pressure" / "memory").write_text(PSI)
    (folder / "vmstat").write_text("pswpin 0\npswpout 0\npgscan_direct 0\n")
    kib = int(available_gib * GIB / 1024)
    fresh = folder / ".fresh"
    fresh.write_text(f"MemTotal: {TOTAL_KIB} kB\nMemFree: {kib // 2} kB\nMemAvailable: {kib} kB\nCached: {kib // 2} kB\n")
    fresh.rename(folder / "meminfo")


def start(folder: Path, first_gib: float, last_gib: float, seconds: float) -> subprocess.Popen[bytes]:
    words = [str(word) for word in (folder, first_gib, last_gib, seconds)]
    return subprocess.Popen([sys.executable, "-m", "tests.support.memory_hog", *words], cwd=Path(__file__).parents[2])


def main(folder: Path, first_gib: float, last_gib: float, seconds: float) -> None:
    taken, began_s = [], time.monotonic()
    while (elapsed_s := time.monotonic() - began_s) < seconds + HUNG_S:
        wanted = min(1.0, elapsed_s / seconds) * (first_gib - last_gib) * GIB / SCALE
        while sum(map(len, taken)) < wanted:
            taken.append(bytearray(b"\1" * (1 << 20)))
        show(folder, first_gib - sum(map(len, taken)) * SCALE / GIB)
        time.sleep(STEP_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(float, sys.argv[2:5]))
