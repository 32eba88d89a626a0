"""Of two starts at the same moment, only one program does the task."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.support.waiting import HUNG_S
from workers.agent import programs
from workers.agent.programs import Programs


def test_two_that_begin_at_once_leave_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[object] = []
    begins, may_go = threading.Event(), threading.Event()

    class HeldJob:
        def __init__(self, *_: Any) -> None:
            begins.set()
            may_go.wait(HUNG_S)
            alive.append(self)

        def end(self) -> None:
            alive.remove(self)

    monkeypatch.setattr(programs, "Job", HeldJob)
    started = Programs()
    names: list[str] = []
    both = [threading.Thread(target=lambda: names.append(started.rate("python", {}, {}))) for _ in range(2)]
    both[0].start()
    begins.wait(HUNG_S)
    both[1].start()
    may_go.set()
    for thread in both:
        thread.join(HUNG_S)

    assert (len(set(names)), len(alive)) == (2, 1)
