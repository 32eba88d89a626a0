"""`python -m tests.support.lone_sparkd serve ..`: sparkd that has the machine to itself, however many tests start one at the same time."""

from __future__ import annotations

import os
import sys

from sparkd.__main__ import main
from sparkd.cluster import machine_lock


def alone() -> None:
    """From now on this process's machine is no other daemon's."""
    machine_lock.NAME = f"\0sparkd-{os.getpid()}"


if __name__ == "__main__":
    alone()
    sys.exit(main())
