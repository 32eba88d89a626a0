"""A job's side of workers.agent.job: an order on stdin, answers on stdout, its end with stdin's. Never knows the meaning of the order."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

Tell = Callable[[Mapping[str, Any]], None]


def ordered(name: str) -> tuple[dict[str, Any], Tell]:
    """(the order, a function that writes an answer), each one line of JSON. From now on the thread `name` ends the process with stdin."""
    order = json.loads(sys.stdin.readline())

    def watch() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=watch, name=name, daemon=True).start()
    return order, _tell


def _tell(line: Mapping[str, Any]) -> None:
    # The reader may be gone: then stdin is closed too.
    with suppress(OSError):
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
