"""Who watches what is left, where the readings fail."""

from __future__ import annotations

import logging
import threading

import pytest

from tests.support.waiting import HUNG_S
from workers.kv import memory_floor
from workers.kv.arithmetic import GIB
from workers.kv.memory import MemoryReading
from workers.kv.memory_floor import Floor


class Memory:
    """Fails `failures` times, then has `room` left."""

    def __init__(self, failures: int, room: int) -> None:
        self.failures = failures
        self.room = room
        self.read_times = 0

    def read(self) -> MemoryReading:
        self.read_times += 1
        if self.read_times <= self.failures:
            raise OSError("meminfo is not there")
        return MemoryReading(8 * GIB, self.room, self.room, 0)


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(memory_floor, "EVERY_S", 0.001)
    caplog.set_level(logging.INFO, "vllm.sparkd.kv")


def test_a_reading_that_fails_does_not_end_the_watch(caplog):
    memory, seen, ended = Memory(3, GIB // 8), list[MemoryReading](), threading.Event()

    def under(reading: MemoryReading) -> None:
        seen.append(reading)
        ended.set()

    with Floor(memory.read, GIB // 2, under):
        assert ended.wait(HUNG_S), "it must go on trying"
    assert [one.room for one in seen] == [GIB // 8]
    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert "OSError: meminfo is not there" in caplog.text
