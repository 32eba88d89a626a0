"""Owns how a foreign file is read in a process of its own: bounded in memory and time, and no thread of this one waits for its parser.

Python's JSON reader holds the interpreter's lock from the first byte to the last, so that a thread beside the loop is not enough: 96 MB of
small objects kept a daemon silent for 20 s, and took 2.4 GiB. Only the standard library is needed, as an agent has no more.
"""

from __future__ import annotations

import os
import pickle
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from sparkd.errors import CheckpointError
from workers.interpreter import module_command, program_environment

# Less is read in this process: JSON of this size takes some 60 ms.
SMALL_BYTES = 256 << 10
MEMORY_BYTES = 1536 << 20
TIME_S = 30

_T = TypeVar("_T")


def is_apart(size_bytes: int) -> bool:
    """Whether a read of this size needs a process of its own. The main thread needs none: a program's other work does not wait for it."""
    return size_bytes > SMALL_BYTES and threading.current_thread() is not threading.main_thread()


def apart(function: Callable[..., _T], raw: bytes, path: str, *more: Any) -> _T:
    """Call `function(raw, path, *more)`, a function of a module of sparkd's, in a process of its own; return its plain values.

    Raises CheckpointError if the function raises it, or if the process takes more memory or time than it may.
    """
    command = module_command(sys.executable, "sparkd.apart")
    environment = program_environment(os.environ)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, cwd="/"
    ) as child:
        too_late = threading.Timer(TIME_S, child.kill)
        too_late.start()
        try:
            answer, _ = child.communicate(pickle.dumps((MEMORY_BYTES, function, path, more)) + raw)
        finally:
            too_late.cancel()
            child.kill()
    if not answer:
        told = f"it takes more than {MEMORY_BYTES >> 20} MiB of memory or {TIME_S} s to read"
        raise CheckpointError(told, file=path, cure="Store the model in more files")
    error, value = pickle.loads(answer)  # our own words: nothing of the file was run
    if error is not None:
        raise CheckpointError(error[0], file=error[1], tensor=error[2], cure=error[3])
    return value


def main() -> None:
    """The process: one function and its bytes on stdin, (error, value) on stdout; nothing where a limit ended it."""
    memory_bytes, function, path, more = pickle.load(sys.stdin.buffer)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (TIME_S, TIME_S))
    answer: tuple[tuple[str, str | None, str | None, str | None] | None, Any]
    try:
        answer = None, function(sys.stdin.buffer.read(), path, *more)
    except CheckpointError as error:
        answer = (error.reason, error.file, error.tensor, error.cure), None
    except MemoryError:
        return
    pickle.dump(answer, sys.stdout.buffer, protocol=pickle.HIGHEST_PROTOCOL)


if __name__ == "__main__":
    main()
