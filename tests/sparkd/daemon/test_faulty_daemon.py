"""A whole daemon whose parts raise what nobody expects: it lives, says so, serves what is READY, and is well once that is over."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stub import stub_engine
from tests.support.daemon_process import DaemonProcess
from tests.support.faulty_sparkd import PARTS
from tests.support.stage import BACKOFF
from tests.support.waiting import until

SHARE, LEAST = 0.2, 15
SETTINGS = {
    "engine": stub_engine() | {"stop_timeout_s": 2},
    "backoff": BACKOFF,
}

pytestmark = pytest.mark.rest


@pytest.fixture
def made(tmp_path: Path) -> Iterator[DaemonProcess]:
    (tmp_path / "model").mkdir()
    models = {name: {"model": str(tmp_path / "model"), "memory_gib": 1} for name in ("m", "other")}
    daemon = DaemonProcess(tmp_path, SETTINGS | {"models": models}, {"FAULTS_FILE": str(tmp_path / "faults")})
    daemon.program = "tests.support.faulty_sparkd"
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.gone()


def errors(made: DaemonProcess) -> float:
    return made.sum_of("sparkd_internal_errors_total")


def test_whatever_its_parts_raise_the_daemon_lives_and_is_well_afterwards(made: DaemonProcess) -> None:
    made.settled()
    made.ray_connected()
    until(lambda: errors(made) >= len(PARTS), "each part has ended once, and began again")
    assert any(one.startswith("InternalError: ") for one in made.status()["conditions"])
    for name in ("other", "m"):
        made.load(name)
        made.wait_for(name, "READY")
    serving, before = made.pid_of("other"), errors(made)

    (made.folder / "faults").write_text(str(SHARE))
    os.kill(made.pid_of("m"), signal.SIGKILL)
    until(lambda: made.chat("other", "hello").status_code == 200 and errors(made) >= before + LEAST, "errors", 0.2)
    assert made.chat("other", "hello").status_code == 200
    (made.folder / "faults").unlink()

    made.wait_for("m", "READY")
    assert made.chat("m", "hello").status_code == 200
    made.ray_connected()
    assert made.pid_of("other") == serving, "what served was let alone"
    assert made.process is not None and made.process.poll() is None
    assert made.end() == 0
