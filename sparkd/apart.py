"""Owns how a foreign file is read in a process of its own: bounded in memory and time, and no thread of this one waits for its parser.

Python's JSON reader holds the interpreter's lock from the first byte to the last, so that a thread beside the loop is not enough: 96 MB of
small objects kept a daemon silent for 20 s, and took 2.4 GiB. Only the standard library is needed, as an agent has no more.
"""

from __future__ import annotations

import logging
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from sparkd.errors import CheckpointError
from workers.interpreter import module_command, program_environment

log = logging.getLogger("sparkd.apart")

# Less is read in this process: JSON of this size takes some 60 ms.
SMALL_BYTES = 256 << 10
MEMORY_BYTES = 1536 << 20
TIME_S: float = 30
# A busy machine may take so long to start a Python and to give it its input.
START_S = 60
# The exit code where the memory did not suffice.
_NO_MEMORY = 7
_MOST_LOGGED = 4000

_T = TypeVar("_T")


def is_apart(size_bytes: int) -> bool:
    """Whether a read of this size needs a process of its own. The main thread needs none: a program's other work does not wait for it."""
    return size_bytes > SMALL_BYTES and threading.current_thread() is not threading.main_thread()


def apart(function: Callable[..., _T], raw: bytes, path: str, *more: Any) -> _T:
    """Call `function(raw, path, *more)`, a function of a module of sparkd's, in a process of its own; return its plain values.

    Raises CheckpointError if the function raises it, if the process takes more memory or time than it may, if none can be started, and
    if it ends in any other way: its own words are in the log then.
    """
    request = pickle.dumps((MEMORY_BYTES, TIME_S, function, path, more)) + raw
    try:
        ended = subprocess.run(
            module_command(sys.executable, "sparkd.apart"),
            input=request,
            capture_output=True,
            env=program_environment(os.environ),
            cwd="/",
            timeout=START_S + TIME_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"the process that reads it gave no answer within {START_S + TIME_S:g} s"
        raise CheckpointError(reason, file=path, cure="Try again when this machine has less to do") from None
    except OSError as error:
        reason = f"no process can be started that reads it: {error.strerror}"
        raise CheckpointError(reason, file=path, cure="Free memory or descriptors on this machine and try again") from None
    if ended.returncode or not ended.stdout:
        raise _failure(ended, path)
    fault, value = pickle.loads(ended.stdout)  # our own words: nothing of the file was run
    if fault is not None:
        raise CheckpointError(fault[0], file=fault[1], tensor=fault[2], cure=fault[3])
    return value


def _failure(ended: subprocess.CompletedProcess[bytes], path: str) -> CheckpointError:
    limit = {_NO_MEMORY: f"{MEMORY_BYTES >> 20} MiB of memory", -signal.SIGALRM: f"{TIME_S:g} s"}.get(ended.returncode)
    if limit is not None:
        return CheckpointError(f"it takes more than {limit} to read", file=path, cure="Store the model in more files")
    words = ended.stderr[-_MOST_LOGGED:].decode(errors="replace")
    log.error("%s: the process that reads it ended with %d: %s", path, ended.returncode, words)
    reason = f"the process that reads it ended with {ended.returncode}"
    return CheckpointError(reason, file=path, cure="sparkd's log says why; a node that has too little memory is one cause")


def main() -> None:
    """The process: one function and its bytes on stdin, (error, value) on stdout."""
    try:
        _answer()
    except MemoryError:
        sys.exit(_NO_MEMORY)


def _answer() -> None:
    memory_bytes, time_s, function, path, more = pickle.load(sys.stdin.buffer)
    raw = sys.stdin.buffer.read()
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    # Nothing handles the signal, so that it ends even a parser that never comes back to the interpreter.
    signal.setitimer(signal.ITIMER_REAL, time_s)
    answer: tuple[tuple[str, str | None, str | None, str | None] | None, Any]
    try:
        answer = None, function(raw, path, *more)
    except CheckpointError as error:
        answer = (error.reason, error.file, error.tensor, error.cure), None
    pickle.dump(answer, sys.stdout.buffer, protocol=pickle.HIGHEST_PROTOCOL)


if __name__ == "__main__":
    main()
