"""`make test-repeat N=10 [LOAD=4]`: the test run again and again in new random orders, and which tests failed in which of them.

    python -m tests.repeat --times N [--load N] -- COMMAND ..

COMMAND is a call of pytest; each run gets a seed of its own. --load: busy processes beside it, each of which computes all the time.
Exit status 1: a test failed in one of the runs, or a run did not end as pytest ends.
"""

from __future__ import annotations

import argparse
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from xml.etree import ElementTree

BUSY = [sys.executable, "-I", "-S", "-c", "while True: pass"]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.repeat",
        description="Run the tests again and again. Exit status 1: a test failed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--times", type=int, default=10, help="how many runs")
    parser.add_argument("--load", type=int, default=0, help="how many busy processes beside them")
    parser.add_argument("command", nargs="+", help="behind --, the call of pytest")
    arguments = parser.parse_args()

    runs = [run(number, arguments.load, arguments.command) for number in range(1, arguments.times + 1)]
    failures: dict[str, list[int]] = defaultdict(list)
    for number, (_, _, _, failed) in enumerate(runs, start=1):
        for name in failed:
            failures[name].append(number)

    print(f"\nRUN        SEED  MINUTES  EXIT  FAILED    beside {arguments.load} busy processes")
    for number, (seed, seconds, status, failed) in enumerate(runs, start=1):
        print(f"{number:3} {seed:11} {seconds / 60:8.1f} {status:5} {len(failed):7}")
    print("\nRUNS  FAILED TEST" if failures else "\nNo test failed.")
    for name, numbers in sorted(failures.items(), key=lambda failure: -len(failure[1])):
        print(f"{len(numbers):4}  {shlex.quote(name)} (run {', '.join(map(str, numbers))})")
    return 1 if any(status for _, _, status, _ in runs) else 0


def run(number: int, load: int, command: list[str]) -> tuple[int, float, int, list[str]]:
    """(seed, seconds, exit status, names of the failed tests) of one run."""
    seed = random.SystemRandom().randrange(1 << 31)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as beside:
        report = Path(folder, "report.xml")
        words = [*command, f"--randomly-seed={seed}", f"--junitxml={report}", "-o", "junit_family=xunit1"]
        print(f"\nrun {number}: {shlex.join(words)}", flush=True)
        for _ in range(load):
            busy = beside.enter_context(subprocess.Popen(BUSY))  # whose exit waits for it
            beside.callback(busy.kill)
        began_s = time.monotonic()
        status = subprocess.run(words, check=False).returncode
        return seed, time.monotonic() - began_s, status, failed_in(report)


def failed_in(report: Path) -> list[str]:
    """The tests of a JUnit report that failed or had an error, as pytest takes them. Only reports of the family xunit1 name the file."""
    if not report.exists():
        return ["(the run wrote no report)"]
    cases = [case for case in ElementTree.parse(report).iter("testcase") if {"failure", "error"} & {part.tag for part in case}]
    return sorted({_node(case) for case in cases})


def _node(case: ElementTree.Element) -> str:
    file = case.get("file", "")
    inside = case.get("classname", "").removeprefix(file.removesuffix(".py").replace("/", ".")).replace(".", "::")
    return f"{file}{inside}::{case.get('name')}"


if __name__ == "__main__":
    sys.exit(main())
