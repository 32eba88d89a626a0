"""A rank's shim whose log lies on a disk that hangs: no write to it returns."""

from __future__ import annotations

import threading

from workers.rank import log, shim
from workers.rank.log import RotatingLog


def hang(_log: RotatingLog, _lines: list[str]) -> None:
    threading.Event().wait()


if __name__ == "__main__":
    RotatingLog.write = hang
    log.WAITING_WRITES = 4
    shim.LOG_S = 0.1  # nothing will come of it
    shim.main()
