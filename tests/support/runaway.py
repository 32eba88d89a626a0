"""An engine that takes memory without end, as a rank starts it: the entry point `tests.support.runaway`.

RUNAWAY_GATE is a file; once it exists, RUNAWAY_BYTES are taken, a few MiB at a time, and held until the process is killed. They are fewer
than its group may hold, so that nobody but the guard ends it, however slow the machine is. Its shim outlives the test that was killed;
RUNAWAY_TEST is that test's pid, and ends it.
"""

from __future__ import annotations

import os
import time

STEP_BYTES = 4 << 20
STEP_S = 0.01


def main() -> None:
    gate, size, test = os.environ["RUNAWAY_GATE"], int(os.environ["RUNAWAY_BYTES"]), f"/proc/{os.environ['RUNAWAY_TEST']}"
    taken: list[bytearray] = []
    while os.path.exists(test):
        if os.path.exists(gate) and len(taken) * STEP_BYTES < size:
            taken.append(bytearray(b"1" * STEP_BYTES))
        time.sleep(STEP_S)


if __name__ == "__main__":
    main()
