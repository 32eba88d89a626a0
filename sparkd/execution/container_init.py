"""The duties of process 1 of a container without an init: the program runs in a child, and process 1 reaps the children of others.

A rank and Ray's processes outlive who started them, so they become children of process 1. It reaps every child: a program that does so
itself takes the exit codes of its own children from asyncio and subprocess.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def run_below_init() -> None:
    """Return in a child of this process, if this is process 1, which stays, passes signals on, and ends as the child does."""
    if os.getpid() != 1:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    child = os.fork()
    if child == 0:
        _take_terminal()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        return

    def pass_on(number: int, _frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _take_terminal() -> None:
    """Ctrl-C goes to the terminal's foreground group: were process 1 in it, the child would get each signal twice."""
    os.setpgid(0, 0)
    if os.isatty(0):
        ours = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        with suppress(OSError):
            os.tcsetpgrp(0, os.getpgrp())
        signal.signal(signal.SIGTTOU, ours)
