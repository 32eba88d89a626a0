"""The parent of one engine: starts it, reads its output, keeps the status file true and ends all its processes. Never restarts it.

Like containerd's shim it leaves the process tree of its caller, so that daemon, actor and raylet may die without it. SIGTERM is an ordered
stop, SIGUSR1 the same without grace. One thread does it all, because PR_SET_PDEATHSIG follows the thread that forked the child
(PR_SET_PDEATHSIG(2const)); another, which starts after that fork, writes the log, because its disk may hang.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import select
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from workers.host import processes
from workers.host.processes import Identity
from workers.rank.log import STARTED, BackgroundLog, LineSplitter, Redactor, RotatingLog
from workers.rank.log_parser import Parser
from workers.rank.spec import RankSpec
from workers.rank.status import remove_sockets, status_path, worker_of, write_status

STATUS_EVERY_S = 0.25
STATUS_IDLE_S = 5.0
KILL_TIMEOUT_S = 10.0
DRAIN_S = 1.0
LOG_S = 3.0  # for the last lines of the log
PIPE_BYTES = 1 << 20
READ_BYTES = 1 << 16
READS_PER_TURN = 16
ENGINE_OOM_SCORE = 500
OPEN_FILES = 65536

_SECRET_NAMES = ("KEY", "TOKEN", "SECRET", "PASSW")


class Shim:
    """Runs one rank from its order (specification, argv, environment) until it ends."""

    def __init__(self, spec: RankSpec, command: list[str], environment: Mapping[str, str]) -> None:
        self._spec = spec
        self._command = command
        self._environment = dict(environment)
        self._path = status_path(spec.run_dir, spec.rank_id)
        self._log = BackgroundLog(RotatingLog(spec.log_path, max_bytes=spec.log_max_bytes, backups=spec.log_backups))
        self._redactor = Redactor(value for name, value in environment.items() if any(part in name.upper() for part in _SECRET_NAMES))
        self._splitter = LineSplitter()
        self._parser = Parser()
        self._epoch_s = time.time() - time.monotonic()  # a wall clock that does not jump when the system's clock is set
        self._me: Identity
        self._engine: Identity | None = None
        self._output = self._wakeup = -1
        self._order = _held_in_memory({"runtime": command[0], "environment": self._environment}) if spec.ray is not None else None
        self._exit_code: int | None = None
        self._survivors: list[int] = []
        self._state = "starting"
        self._stop_ordered = False
        self._is_ending = False
        self._kill_at_s: float | None = None
        self._dirty = False
        self._written_at_s = 0.0
        self._started_at_s = time.time()

    def run(self, answer_fd: int) -> None:
        """Run until every process of the rank is gone or cannot be ended. Write the handle, or the error, to answer_fd."""
        self._me = _identity_of_this_process()
        self._wakeup = _catch_signals()
        # If the kernel refuses it, orphans go to init and are found by their session.
        processes.prctl(processes.PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
        try:
            write_status(self._path, self._status())  # the handle is on disk before the engine exists
            self._start_engine()
        except OSError as error:
            reason = f"The rank {self._spec.rank_id} cannot be started: {error}. Check engine.runtime and the run directory."
            _answer(answer_fd, {"error": reason})
            return
        self._write_status()
        _answer(answer_fd, {"handle": self._handle()})
        try:
            while self._exit_code is None and not self._is_due():
                self._turn(STATUS_IDLE_S)
            self._finish()
        except Exception as error:
            self._say(f"the rank's shim failed, and its engine goes with it: {error!r}")
            self._log.close(LOG_S)
            raise

    def _start_engine(self) -> None:
        """Fork and exec the engine. Raises OSError if the runtime cannot be executed."""
        self._output, output_end = os.pipe()
        failure, failure_end = os.pipe()
        with suppress(OSError):  # above this user's pipe quota: the kernel's 64 KiB are enough
            fcntl.fcntl(self._output, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self._output, False)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_engine(parent, self._command, self._environment, output_end, failure_end)
        os.close(output_end)
        os.close(failure_end)
        with os.fdopen(failure, "rb") as pipe:
            reason = pipe.read().decode("utf-8", "replace")
        if reason:
            os.waitpid(pid, 0)
            raise OSError(f"{self._command[0]}: {reason}")
        # The engine was not reaped yet, so /proc shows it even if it has ended.
        stat = processes.read_stat(pid)
        self._engine = Identity(pid, stat.start_ticks if stat else -1, self._me.boot_id)
        self._state = "running"
        self._say(f"{STARTED} {pid}: {shlex.join(self._command)}")

    def _turn(self, timeout_s: float) -> None:
        """Wait at most timeout_s for output, signals and children, and handle them."""
        if self._kill_at_s is not None:
            timeout_s = min(timeout_s, max(0.0, self._kill_at_s - time.monotonic()))
        if self._dirty:
            timeout_s = min(timeout_s, STATUS_EVERY_S)
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        if self._output >= 0:
            poll.register(self._output, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(timeout_s * 1000)}
        if self._output in ready:
            self._pump()
        if self._wakeup in ready:
            self._take_signals(os.read(self._wakeup, 4096))
        self._reap()
        self._write_status_when_due()

    def _pump(self) -> None:
        """Read the engine's output. A full pipe would block the engine."""
        for _ in range(READS_PER_TURN):
            try:
                data = os.read(self._output, READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                os.close(self._output)
                self._output = -1
                break
            self._take_lines(self._splitter.feed(data))
        # tqdm writes a carriage return before each bar, so the newest bar is always an unfinished line.
        if tail := self._splitter.tail:
            self._parse(self._redactor.clean(tail))

    def _take_lines(self, lines: list[str]) -> None:
        to_log = []
        for line in lines:
            if line.strip():
                line = self._redactor.clean(line)
                self._parse(line)
                to_log.append(line)
        self._log.write(to_log)

    def _parse(self, line: str) -> None:
        before = self._parser.phase, self._parser.error_at_s
        if self._parser.feed(line, self._epoch_s + time.monotonic()):
            self._dirty = True
        if (self._parser.phase, self._parser.error_at_s) != before:
            self._write_status()  # at once: an error must be known before the ranks that end of it are missed

    def _take_signals(self, numbers: bytes) -> None:
        if self._is_ending:
            return  # the engine has ended or is being ended, so an order changes nothing
        if processes.STOP_NOW in numbers:
            self._order_stop(grace_s=0.0)
        elif processes.STOP in numbers and not self._stop_ordered:
            self._order_stop(grace_s=self._spec.stop_timeout_s)

    def _order_stop(self, *, grace_s: float) -> None:
        if not self._stop_ordered:
            self._stop_ordered = True
            self._say(f"stop ordered, {grace_s:g} s of grace")
            self._write_status()
            # The engine leads its own process group. The group's number is still its own, because the engine was not reaped yet.
            if self._engine and self._exit_code is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._engine.pid, signal.SIGTERM)
        self._kill_at_s = time.monotonic() + grace_s

    def _is_due(self) -> bool:
        return self._kill_at_s is not None and time.monotonic() >= self._kill_at_s

    def _reap(self) -> None:
        """Reap the engine, and its orphans, which the kernel gives to this subreaper."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._engine and pid == self._engine.pid:
                self._exit_code = os.waitstatus_to_exitcode(status)
                self._write_status()  # at once: a scan that finds the engine dead needs the exit code

    def _finish(self) -> None:
        """End the remaining processes after the engine ended or its grace is over, read its last output, and record how it ended."""
        self._is_ending, self._kill_at_s = True, None
        self._survivors = processes.kill_all(self._members, timeout_s=KILL_TIMEOUT_S, between=self._turn)
        deadline_s = time.monotonic() + DRAIN_S
        while self._output >= 0 and time.monotonic() < deadline_s:
            self._turn(DRAIN_S / 10)
        self._reap()
        self._take_lines(self._splitter.finish())
        how = "as ordered" if self._stop_ordered else "by itself"
        lost = "" if self._stop_ordered else self._parser.progress["lost"]
        self._say(f"engine ended {how}{f' ({lost})' if lost else ''}, exit code {self._exit_code}")
        if self._survivors:
            self._say(f"processes that SIGKILL did not end: {self._survivors}")
        remove_sockets(self._spec.run_dir, self._spec.rank_id, self._spec.socket_path)
        self._log.close(LOG_S)
        self._state = "exited"
        self._write_status()

    def _members(self) -> dict[int, Identity]:
        self._reap()
        return processes.members(shim=self._me, engine=self._engine, worker=worker_of(self._spec.run_dir, self._spec.rank_id))

    def _say(self, text: str) -> None:
        self._log.write([self._redactor.clean(f"[sparkd] {time.strftime('%Y-%m-%d %H:%M:%S')} {text}")])

    def _write_status_when_due(self) -> None:
        if time.monotonic() - self._written_at_s >= (STATUS_EVERY_S if self._dirty else STATUS_IDLE_S):
            self._write_status()

    def _write_status(self) -> None:
        self._written_at_s = time.monotonic()
        try:
            write_status(self._path, self._status())
            self._dirty = False
        except FileNotFoundError:  # the runtime folder is gone, and the engine's socket and key with it: no daemon can reach it
            self._order_stop(grace_s=0.0)
        except OSError:  # the disk is full: the engine runs on, and the next change tries again
            self._dirty = True

    def _status(self) -> dict[str, Any]:
        return {
            "handle": self._handle(),
            "state": self._state,
            "engine_pid": self._engine.pid if self._engine else None,
            "engine_start_ticks": self._engine.start_ticks if self._engine else None,
            "exit_code": self._exit_code,
            "stop_ordered": self._stop_ordered,
            "survivors": self._survivors,
            "epoch_s": self._epoch_s,
            "order_fd": self._order,
            "progress": self._parser.progress,
            "diagnosis": asdict(self._parser.diagnosis) if self._parser.diagnosis else None,
        }

    def _handle(self) -> dict[str, Any]:
        spec = self._spec
        return {
            "rank_id": spec.rank_id,
            "model": spec.model_name,
            "generation": spec.generation,
            "node_id": spec.node_id,
            "rank": spec.rank,
            "pid": self._me.pid,
            "start_ticks": self._me.start_ticks,
            "boot_id": self._me.boot_id,
            "socket_path": spec.socket_path,
            "host": spec.host,
            "port": spec.port,
            "api_key_path": spec.api_key_path,
            "config_hash": spec.config_hash,
            "log_path": spec.log_path,
            "started_at_s": self._started_at_s,
            "world": spec.world,
            "attempt": spec.attempt,
            "memory_gib": spec.memory_gib,
            "parsers": None if spec.parsers is None else dict(spec.parsers),
        }


def main() -> None:
    """Read the order from standard input, leave the caller's process tree, and answer on standard output with one line of JSON."""
    order = json.load(sys.stdin)
    shim = Shim(RankSpec.from_dict(order["spec"]), order["command"], order["environment"])
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    processes.prctl(processes.PR_SET_NAME, ctypes.create_string_buffer(processes.SHIM_NAME.encode()))
    _lower_own_oom_score()
    answer_fd = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    shim.run(answer_fd)


def _become_engine(parent: int, command: list[str], environment: Mapping[str, str], output: int, failure: int) -> NoReturn:
    """In the forked child, exec the engine. An error is written to `failure`, which exec closes."""
    try:
        processes.prctl(processes.PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(127)  # the shim died before the line above
        os.setpgid(0, 0)
        _write_oom_score(ENGINE_OOM_SCORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file holds prompts
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if resource.RLIM_INFINITY != soft < OPEN_FILES:
            resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES), hard))
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.execve(command[0], command, environment)
    except OSError as error:
        os.write(failure, (error.strerror or str(error)).encode())
    finally:
        os._exit(127)


def _held_in_memory(order: Mapping[str, Any]) -> int:
    """A descriptor of this process that another of this user's reads by /proc/PID/fd: the order is in no file and no environment."""
    fd = os.memfd_create("order")
    os.write(fd, json.dumps(order).encode())
    return fd


def _catch_signals() -> int:
    """Install the signal handlers. Returns the read end of a pipe that gets the number of each signal."""
    read_end, write_end = os.pipe()
    for fd in (read_end, write_end):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (processes.STOP, processes.STOP_NOW, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    return read_end


def _lower_own_oom_score() -> None:
    """Undo Ray's oom_score_adj of 1000 (worker_oom_score_adjustment), which the shim inherits: it must not die before its engine."""
    try:
        if int(Path("/proc/self/oom_score_adj").read_text(encoding="ascii")) > 0:
            _write_oom_score(0)
    except OSError:
        pass  # /proc is mounted without it


def _write_oom_score(score: int) -> None:
    with suppress(OSError):  # a score below root's needs CAP_SYS_RESOURCE; without it the kernel chooses by size alone
        Path("/proc/self/oom_score_adj").write_text(f"{score}\n", encoding="ascii")


def _identity_of_this_process() -> Identity:
    me = processes.identity(os.getpid())
    if me is None:
        raise OSError("/proc does not show this process: mount it without hidepid for this user")
    return me


def _answer(fd: int, answer: Mapping[str, Any]) -> None:
    with suppress(OSError):  # the caller is gone; the next daemon reads the status file
        os.write(fd, json.dumps(answer).encode() + b"\n")
    os.close(fd)


if __name__ == "__main__":
    main()
