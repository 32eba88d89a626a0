"""`python -m tests.bench.hog --model FOLDER`: a real memory hog beside a real engine in a machine of a few GiB. Never asserts; it prints.

The whole daemon, its Ray, a real vLLM and the hog are in one memory cgroup whose figures they see as /proc/meminfo
(tests/support/memory_box.py), so the guard, the bundle, the refusal to load and the return are those of a machine that runs out. `--stub`:
the stub engine. Needs root. Exit code 1: a bar was missed, 2: this machine permits no memory cgroup.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tests.bench.arguments import Parser, amount, model
from tests.stub import stub_engine
from tests.support.daemon_process import ROOT, DaemonProcess
from tests.support.memory_box import GIB, MemoryBox, NoBox
from tests.support.waiting import until

SOFT_GIB, HARD_GIB, FLOOR_GIB = 1.5, 1.0, 0.4
REACTION_S = 1.0
# Touches memory at so many bytes a second until it is killed, or the box has only LAST bytes left.
_HOG = """
import sys, time
from pathlib import Path
rate, last = float(sys.argv[1]), float(sys.argv[2])
taken, began = [], time.monotonic()
while True:
    available = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) << 10
    if len(taken) < (time.monotonic() - began) * rate / (1 << 22) and available > last:
        taken.append(bytearray(b"1" * (1 << 22)))
    else:
        time.sleep(0.01)
"""


class BoxedDaemon(DaemonProcess):
    """A daemon in a MemoryBox."""

    def __init__(self, folder: Path, settings: dict[str, Any], box: MemoryBox) -> None:
        super().__init__(folder, settings)
        self._box = box

    def start(self, *arguments: str) -> None:
        serve = [sys.executable, "-m", self.program, "serve", "--config", str(self.config), "--log-level", "info", *arguments]
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                self._box.command(serve), cwd=ROOT, env=os.environ | {"RAY_memory_monitor_refresh_ms": "0"}, stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip


def main() -> int:
    parser = Parser("tests.bench.hog", __doc__, stub=True, model=None, limit_gib=4.0, rate_gib_s=1.0)
    parser.add_argument("--model", type=model, help="a folder with a small model")
    parser.add_argument("--stub", action="store_true")
    parser.add_argument("--limit-gib", type=amount, default=7.0)
    parser.add_argument("--rate-gib-s", type=amount, default=0.5)
    asked = parser.parse_args()
    if (asked.model is None) == (not asked.stub):
        parser.error("give --model FOLDER, or --stub")
    with tempfile.TemporaryDirectory(prefix="sh") as folder:
        try:
            box = MemoryBox(Path(folder), int(asked.limit_gib * GIB))
        except NoBox as why:
            print(f"nothing was measured: {why}")
            return 2
        try:
            return _run(Path(folder), box, asked)
        finally:
            box.close()


def _run(folder: Path, box: MemoryBox, asked: argparse.Namespace) -> int:
    (folder / "model").mkdir()
    entry: dict[str, Any] = {"model": str((asked.model or folder / "model").absolute()), "preload": True, "memory_gib": 2}
    engine: dict[str, Any] = {"stop_timeout_s": 5}
    if asked.stub:
        engine |= stub_engine()
    else:
        entry |= {"max_model_len": 1024, "max_num_seqs": 4, "kv_cache": {"bytes": 256 << 20}}
    settings = {
        "engine": engine,
        "backoff": {"initial_s": 1, "max_s": 2},
        "memory": {"guard": "on", "soft_gib": SOFT_GIB, "hard_gib": HARD_GIB, "floor_gib": FLOOR_GIB},
        "models": {"m": entry},
    }
    made = BoxedDaemon(folder, settings, box)
    made.start()
    hog = None
    try:
        made.settled()
        made.wait_for("m", "READY")
        assert made.chat("m", "Hello").status_code == 200
        before, box.least_available_bytes = made.pid_of("m"), box.available_bytes()
        print(
            f"cgroup v{box.version} of {asked.limit_gib:g} GiB, the model answers, {box.available_bytes() / GIB:.2f} GiB available",
            flush=True,
        )
        # An idle model would be unloaded before the guard has to kill anything.
        busy = threading.Thread(target=_stay_busy, args=(made, folder / "never"), daemon=True)
        busy.start()
        until(lambda: made.metric("sparkd_in_flight", '"m"'), "the model is at work")
        words = box.command([sys.executable, "-c", _HOG, str(asked.rate_gib_s * GIB), str(0.7 * GIB)])
        hog = subprocess.Popen(words)
        failed = until(lambda: _failed(made), f"the guard acts; {made.tail()}")
        least = box.least_available_bytes
        print(f"the engine failed: {failed}: {made.model('m').get('message')}", flush=True)
        (summary,) = until(lambda: made.get("/admin/v1/incidents")["incidents"], "a bundle")
        bundle = made.get(f"/admin/v1/incidents/{summary['id']}")
        rows = bundle["readings"]
        crossed_s = next((row[0] for row in rows if row[1] < HARD_GIB * GIB), rows[-1][0])
        time.sleep(5)
        held = made.model("m")["state"]
        condition = next((one for one in made.status()["conditions"] if one.startswith("MemoryShort")), None)
        refused = made.chat("m", "Hello").status_code if held == "FAILED" else 0
        hog.kill()
        hog.wait()
        began_s = time.monotonic()
        made.wait_for("m", "READY")
        back_s, answered = time.monotonic() - began_s, made.chat("m", "Hello").status_code
        reaction_s, kills = rows[-1][0] - crossed_s, box.oom_kills()
        bars = {
            f"reason: {failed}": failed == "MemoryGuard",
            f"least available {least / GIB:.2f} GiB, floor {FLOOR_GIB} GiB": least > FLOOR_GIB * GIB,
            f"from the crossing to the kill {reaction_s:.2f} s, bar {REACTION_S} s": asked.smallest or reaction_s <= REACTION_S,
            f"bundle {summary['id']}: {len(rows)} readings, {len(bundle['log'])} log lines": len(rows) > 5 and bool(bundle["log"]),
            f"while the hog lives: {held}, {condition}, a request gets {refused}": held == "FAILED" and condition is not None,
            f"READY again {back_s:.1f} s after the hog's end, answers {answered}": answered == 200 and made.pid_of("m") != before,
            f"kills by the kernel: {kills}": kills == 0,
        }
        for told, held_bar in bars.items():
            print(f"{'ok    ' if held_bar else 'MISSED'} {told}", flush=True)
        return 0 if all(bars.values()) else 1
    finally:
        if hog and hog.poll() is None:
            hog.kill()
            hog.wait()
        made.gone()


def _stay_busy(made: DaemonProcess, gate: Path) -> None:
    """A request that ends with its engine."""
    with suppress(httpx.HTTPError):
        made.chat("m", "Count.", stream=True, max_tokens=900, ignore_eos=True, stub={"gate": str(gate), "gate_after": 1})


def _failed(made: DaemonProcess) -> str | None:
    seen = made.model("m")
    return str(seen["reason"]) if seen.get("state") == "FAILED" else None


if __name__ == "__main__":
    sys.exit(main())
