"""Who watches what is left, where the readings fail."""

from __future__ import annotations

import logging
import threading

import pytest

from tests.support.waiting import HUNG_S
from workers.kv import memory_floor
from workers.kv.arithmetic import GIB
from workers.kv.memory import MemoryReading
from workers.kv.memory_floor import BLIND, Floor


class Memory:
    """Fails `failures` times, then has `room` left."""

    def __init__(self, failures: int, room: int) -> None:
        self.failures = failures
        self.room = room
        self.read_times = 0
        self.enough = threading.Event()

    def read(self) -> MemoryReading:
        self.read_times += 1
        if self.read_times > BLIND + 5:
            self.enough.set()
        if self.read_times <= self.failures:
            raise OSError("meminfo is not there")
        return MemoryReading(8 * GIB, self.room, self.room, 0)


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(memory_floor, "EVERY_S", 0.001)
    caplog.set_level(logging.INFO, "vllm.sparkd.kv")


@pytest.mark.parametrize("failures", [1, BLIND + 1])
def test_a_reading_that_fails_does_not_end_the_watch(caplog, failures):
    memory, seen, ended = Memory(failures, GIB // 8), list[MemoryReading](), threading.Event()

    def under(reading: MemoryReading) -> None:
        seen.append(reading)
        ended.set()

    with Floor(memory.read, GIB // 2, under):
        assert ended.wait(HUNG_S), "it must go on trying"
    assert [one.room for one in seen] == [GIB // 8]
    assert caplog.text.count("OSError: meminfo is not there") == 1
    blind = failures > BLIND
    assert [one.levelname for one in caplog.records] == (["WARNING", "ERROR", "INFO"] if blind else ["WARNING"])
    assert (f" {BLIND} " in caplog.text) is blind


def test_where_nothing_can_be_read_it_is_said_once_that_nobody_watches(caplog):
    memory = Memory(1 << 30, 8 * GIB)
    with Floor(memory.read, GIB // 2, lambda _reading: None):
        assert memory.enough.wait(HUNG_S)
    assert [one.levelname for one in caplog.records] == ["WARNING", "ERROR"]
    assert "0.50 GiB" in caplog.records[1].message


def test_a_rehearsal_too_short_for_it_says_so_at_its_end(caplog):
    memory, failed = Memory(1 << 30, 8 * GIB), threading.Event()

    def read() -> MemoryReading:
        if memory.read_times:
            failed.set()
            floor._ended.wait(HUNG_S)
        return memory.read()

    floor = Floor(read, GIB // 2, lambda _reading: None)
    with floor:
        assert failed.wait(HUNG_S)
    assert [one.levelname for one in caplog.records] == ["WARNING", "ERROR"]
