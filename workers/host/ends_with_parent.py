"""Becomes a program that the kernel ends with its parent: `python -m workers.host.ends_with_parent PARENT_PID PROGRAM [ARGUMENT ...]`.

The parent is the thread that starts it (PR_SET_PDEATHSIG(2const)), so that thread must live for as long as the program is needed. The
signal is set here, in a process of its own: code between fork and exec of a process with many threads may hang (fork(2)).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

from workers.host import processes
from workers.host.interpreter import PACKAGE_DIR, module_command

REFUSED = 127


def command(program: Sequence[str]) -> list[str]:
    """The argv that runs `program`, whose first word is a path, as a child of this process. Its environment is `environment`'s."""
    return module_command(sys.executable, "workers.host.ends_with_parent", str(os.getpid()), *program)


def environment(program: dict[str, str]) -> dict[str, str]:
    """The environment for `command`, so that the program gets the variables of `program`."""
    return program | {"PYTHONPATH": PACKAGE_DIR}


def main(arguments: Sequence[str]) -> int:
    """Returns only if the program cannot be run, or its parent has ended."""
    parent, program = int(arguments[0]), list(arguments[1:])
    processes.prctl(processes.PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        return REFUSED  # the parent died before the line above
    # Python ignores it, and so would the program (execve(2)), which must end once its output has no reader.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execve(program[0], program, {name: value for name, value in os.environ.items() if name != "PYTHONPATH"})
    except OSError as error:
        sys.stderr.write(f"{program[0]} cannot be run: {error.strerror or error}\n")
    return REFUSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
