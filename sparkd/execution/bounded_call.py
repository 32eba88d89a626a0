"""A function call in a process of its own: bounded in time and memory, and free of this process's interpreter lock.

A thread cannot be ended from outside, and one that holds the interpreter's lock keeps the event loop from its work.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO, TypeVar

from sparkd.errors import SparkdError
from workers.host import processes
from workers.host.interpreter import module_command, program_environment

log = logging.getLogger("sparkd.bounded_call")

# A busy machine may take so long to start a Python and to give it its input.
START_S: float = 60
# How long the kernel may take to end a process after SIGKILL. One that it cannot end is let go.
KILLED_S: float = 5
# The limit of its address space: a process with sparkd's imports and the sixteen threads that ask a hub takes 1.2 GiB, which leaves more
# than ten times the size of the largest published headers. Without a bound, hostile headers would take the node's memory from its engines.
MEMORY_BYTES: int = 4 << 30
# The exit code where the memory did not suffice.
_NO_MEMORY = 7
_MOST_LOGGED = 4000

_T = TypeVar("_T")
# Whether this process is one that `call` has started: its own calls have its bounds already.
_is_bounded = False


class NoAnswer(Exception):
    """The process gave none. exceeded: the bound that it went beyond, as `30 s`; None where it ended otherwise. Reason and cure end with
    no full stop."""

    def __init__(self, reason: str, cure: str, exceeded: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.cure = cure
        self.exceeded = exceeded


def call(function: Callable[..., _T], *arguments: Any, time_s: float) -> _T:
    """`function(*arguments)`, a function of a module of ours, in a process of its own; plain values go in and come out. Blocks.

    time_s: the call's own, after the start of the process. Raises the SparkdError that the function raises; NoAnswer where the call takes
    longer or more than MEMORY_BYTES, no process can be started, or it ends in any other way: its own words are in the log then.
    """
    if _is_bounded:
        return function(*arguments)
    exit_code, stdout, stderr = _run(pickle.dumps((MEMORY_BYTES, time_s, function, arguments)), START_S + time_s)
    if exit_code or not stdout:
        if exit_code == _NO_MEMORY:
            raise NoAnswer(f"it takes more than {MEMORY_BYTES >> 20} MiB of memory", "Check where this model's files come from")
        if exit_code == -signal.SIGALRM:
            raise NoAnswer(f"it takes more than {time_s:g} s", "Try again when this machine has less to do", f"{time_s:g} s")
        log.error("%s: its process ended with %d: %s", function.__name__, exit_code, stderr[-_MOST_LOGGED:].decode(errors="replace"))
        raise NoAnswer(f"its process ended with {exit_code}", "sparkd's log says why; a node that has too little memory is one cause")
    fault, value = _loaded(stdout)
    if fault is not None:
        raise _error(*fault)
    return value


def _run(request: bytes, timeout_s: float) -> tuple[int, bytes, bytes]:
    """Exit code, stdout and stderr of the process. Nothing that it started outlives it, but what begins a session of its own."""
    try:
        # Files in memory: no pipe makes one wait for the other, or for a descendant that keeps it open.
        with _file("request") as stdin, _file("answer") as stdout, _file("log") as stderr:
            stdin.write(request)
            stdin.seek(0)
            process = subprocess.Popen(
                module_command(sys.executable, "sparkd.execution.bounded_call"),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=program_environment(os.environ),
                cwd="/",
                start_new_session=True,
            )
            try:
                exit_code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                cure = "Try again when this machine has less to do"
                raise NoAnswer(f"its process gave no answer within {timeout_s:g} s", cure) from None
            finally:
                _end(process)
            stdout.seek(0)
            stderr.seek(0)
            return exit_code, stdout.read(), stderr.read()
    except OSError as error:
        cure = "Free memory or descriptors on this machine and try again"
        raise NoAnswer(f"no process can be started for it: {error.strerror}", cure) from None


def _file(name: str) -> BinaryIO:
    return open(os.memfd_create(name), "w+b")


def _end(process: subprocess.Popen[bytes]) -> None:
    """With its descendants: they are of its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # One that hangs in the kernel, as on a file server that is gone, takes no signal.
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_S)


def _error(kind: type[SparkdError], message: str, members: dict[str, Any]) -> SparkdError:
    """The error as it was raised there, without a call of its constructor, which may take other arguments."""
    error = kind.__new__(kind, message)
    vars(error).update(members)
    return error


def main() -> None:
    """The process: one function and its arguments on stdin, (error, value) on stdout."""
    try:
        _answer()
    except MemoryError:
        sys.exit(_NO_MEMORY)


def _loaded(raw: bytes) -> Any:
    """Without collections of garbage: each would stop all threads while it looks through the whole of a large answer."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return pickle.loads(raw)
    finally:
        if was_enabled:
            gc.enable()


def _answer() -> None:
    global _is_bounded
    _is_bounded = True
    # The arguments may hold a token.
    processes.hide()
    memory_bytes, time_s, function, arguments = pickle.load(sys.stdin.buffer)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    # Nothing handles the signal, so that it ends even a parser that never comes back to the interpreter.
    signal.setitimer(signal.ITIMER_REAL, time_s)
    answer: tuple[tuple[type[SparkdError], str, dict[str, Any]] | None, Any]
    try:
        answer = None, function(*arguments)
    except SparkdError as error:
        answer = (type(error), str(error), vars(error)), None
    pickle.dump(answer, sys.stdout.buffer, protocol=pickle.HIGHEST_PROTOCOL)


if __name__ == "__main__":
    # The module by its name, which the function's own calls import.
    from sparkd.execution import bounded_call

    bounded_call.main()
