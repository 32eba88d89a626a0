"""A stub engine's pretended load of weights: at an even pace, reported like the streaming loader's. Never reads a file."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence

from workers.load.progress import ProgressFile

UNITS = 100
_GATE_AGAIN_S = 0.05
_FLAG = "model-loader-extra-config"


class StubLoad:
    """A load of `nbytes` of weights in UNITS units. For 0 bytes, or without the loader's settings in the flags, it reports nothing.

    gate: a file; the load stands still behind its first half until it exists. Empty: it does not.
    """

    def __init__(self, flags: Mapping[str, Sequence[str]], nbytes: int, gate: str = "") -> None:
        """SystemExit where the settings are no JSON object, as vLLM."""
        try:
            settings = json.loads((flags.get(_FLAG) or ["{}"])[0])
            path = settings.get("progress")
        except (ValueError, AttributeError):
            raise SystemExit(f"stub: argument --{_FLAG}: no JSON object") from None
        self._file = ProgressFile(path if nbytes else None)
        self._nbytes = nbytes
        self._gate = gate
        self._units = 0

    def begin(self) -> None:
        self._file.begin(self._nbytes, UNITS, "stub", "checkpoint")

    async def go_on(self, stop: asyncio.Event, seconds: float, share: float) -> None:
        """Until `share` (0 to 1) of the weights is loaded, spread over `seconds`, or the process is to end."""
        ahead = round(share * UNITS) - self._units
        for _ in range(ahead):
            await pause(stop, seconds / ahead)
            if stop.is_set():
                return
            self._units += 1
            self._report()

    async def pass_gate(self, stop: asyncio.Event) -> None:
        while self._held() and not stop.is_set():
            self._report()
            await pause(stop, _GATE_AGAIN_S)

    def _held(self) -> bool:
        return bool(self._gate) and not os.path.exists(self._gate)

    def _report(self) -> None:
        self._file.advance(self._units * self._nbytes // UNITS, self._units)

    def done(self) -> None:
        self._file.done(self._nbytes, True)

    def fail(self, message: str) -> None:
        self._file.failed(message)


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """Sleeps, unless the process is to end."""
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return
