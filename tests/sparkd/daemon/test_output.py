"""The daemon serves on while a terminal does not take its output: one that stands still, and one that is closed."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from sparkd.daemon.output import WAITING, Output
from tests.support.daemon_process import DaemonProcess
from tests.support.waiting import until

# A terminal keeps 4 KiB that nobody has read, and each request is a line of some 200 characters.
REQUESTS = 200


class OnTerminal(DaemonProcess):
    """A daemon that has a terminal of its own, as in a window, and no Ray."""

    terminal = -1

    def _launch(self, through: Sequence[str], arguments: Sequence[str], pass_fds: Sequence[int] = ()) -> None:
        self.terminal, end = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.program, "serve", "--config", str(self.config), *arguments],
            cwd=self.root,
            stdin=end,
            stdout=end,
            stderr=end,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(end)

    def close(self) -> None:
        if self.terminal >= 0:
            os.close(self.terminal)
            self.terminal = -1


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[OnTerminal]:
    made = OnTerminal(tmp_path, {"cluster": {"address": "127.0.0.1:1"}})
    yield made
    made.kill()
    made.close()
    made.client.close()


def test_what_nobody_reads_is_left_out_and_said() -> None:
    readable, writable = os.pipe()
    with os.fdopen(readable) as reader, os.fdopen(writable, "w") as pipe:
        stream = Output(pipe)
        for number in range(3 * WAITING):
            stream.write(f"{number:0200}\n")
        stream.flush()
        lines = iter(reader.readline, "")
        assert next(lines) == f"{0:0200}\n"
        assert next(line for line in lines if "left out" in line)


def test_a_terminal_that_nobody_reads_holds_up_no_request(daemon: OnTerminal) -> None:
    daemon.start("--log-level", "debug")
    daemon.settled()
    for _ in range(REQUESTS):
        assert daemon.client.get("/v1/models").status_code == 200
    assert daemon.end(signal.SIGTERM) == 0


def test_a_terminal_that_is_closed_and_signals_that_mean_nothing_end_nothing(daemon: OnTerminal) -> None:
    daemon.start()
    daemon.settled()
    assert daemon.process is not None
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        daemon.process.send_signal(number)
    daemon.config.write_text("listen: none")
    daemon.close()
    until(lambda: "listen" in str(daemon.status()["conditions"]), "SIGHUP came, and the file is read again")
    assert daemon.client.get("/v1/models").status_code == 200
    assert daemon.end(signal.SIGTERM) == 0
