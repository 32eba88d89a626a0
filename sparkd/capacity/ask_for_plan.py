"""The program that has this node's vLLM answer the questions of a plan: the arguments of ask_here on stdin, lines of JSON on stdout.

A process of its own, because the headers of a model that is not on this machine are large, and to send them would hold the event loop.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import sys

from sparkd.capacity.plan_for_node import ask_here
from sparkd.errors import SparkdError
from workers.host import processes


def main() -> None:
    """Each line has a `step`; one with an `error` is the last."""
    # It ends with the daemon that started it. The order may hold a token.
    processes.prctl(processes.PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    processes.hide()
    # Engines and the gateway go first.
    os.nice(10)
    try:
        order, memory_bytes = pickle.load(sys.stdin.buffer)
        ask_here(order, memory_bytes, lambda step, _: _say("step", step))
    except SparkdError as error:
        _say("error", error.message)
    except OSError as error:
        _say("error", f"vLLM could not be asked: {error.strerror or error}.")


def _say(key: str, value: str) -> None:
    sys.stdout.write(f"{json.dumps({key: value})}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
