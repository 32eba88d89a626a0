"""Threads beside a part of the soak: `Watch` asks /livez, `Chats` asks the model."""

from __future__ import annotations

import http.client
import threading
import time
from abc import ABC, abstractmethod
from typing import Self

import httpx

from tests.support.daemon_process import DaemonProcess


class Beside(ABC):
    """Calls `step` every `every_s` for as long as it is open. An error of a step is raised where it is closed."""

    every_s: float

    def __init__(self) -> None:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._error: BaseException | None = None

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    @abstractmethod
    def step(self) -> None: ...

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end.set()
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._end.wait(self.every_s):
                self.step()
        except Exception as error:  # noqa: BLE001 - raised again by __exit__
            self._error = error


class Watch(Beside):
    """The longest time that /livez took while it is open. failed: it had another answer than 200, or none.

    late_s: by how much the watch itself was woken too late, at most. On a machine that has too few CPUs for what runs, it is as long.
    """

    every_s = 0.05

    def __init__(self, port: int) -> None:
        super().__init__()
        self._client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self._slept_s = time.monotonic()
        self.longest_s = self.late_s = 0.0
        self.failed = False

    def step(self) -> None:
        asked_s = time.monotonic()
        self.late_s = max(self.late_s, asked_s - self._slept_s - self.every_s)
        try:
            self._client.request("GET", "/livez")
            answer = self._client.getresponse()
            answer.read()
            self.failed = self.failed or answer.status != 200
        except (OSError, http.client.HTTPException):
            self.failed = True
            self._client.close()  # the next request opens it again
        self._slept_s = time.monotonic()
        self.longest_s = max(self.longest_s, self._slept_s - asked_s)

    def __exit__(self, kind: type[BaseException] | None, *more: object) -> None:
        super().__exit__(kind, *more)
        self._client.close()


class Chats(Beside):
    """One chat after another for as long as it is open. count: those with 200; bad: statuses but 200 and 503, and names of errors."""

    every_s = 0.02

    def __init__(self, made: DaemonProcess) -> None:
        super().__init__()
        self._made = made
        self.count = 0
        self.bad: set[str] = set()

    def step(self) -> None:
        try:
            status = self._made.chat("m", "x", max_tokens=1).status_code
        except httpx.HTTPError as error:
            self.bad.add(type(error).__name__)
            return
        if status == 200:
            self.count += 1
        elif status != 503:
            self.bad.add(str(status))
