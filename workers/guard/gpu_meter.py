"""Measures the node's first GPU twice a second, by one nvidia-smi that runs on. Never waits for one that prints nothing.

An nvidia-smi that runs on keeps the driver open. On hosts where the driver starts at each call, each answer of a new one takes seconds.
"""

from __future__ import annotations

import math
import os
import select
import shutil
import subprocess
import threading
import time
from contextlib import suppress
from typing import Any

from workers.host import ends_with_parent
from workers.host.bounded_child import PLACES, REAP_S, let_go, stuck

PROGRAM = "nvidia-smi"
EVERY_MS = 500
# Every driver knows the reasons by this name; the newer one, clocks_event_reasons, is a second name of the same (driver 580).
_FIELDS = ("power.draw", "utilization.gpu", "temperature.gpu", "clocks.current.sm", "clocks_throttle_reasons.active", "name")
# Without --id a row does not say which GPU it is of. Each row is flushed, to a pipe too (driver 580).
ARGUMENTS = ("--id=0", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits", "-lms", str(EVERY_MS))
# nvml.h, nvmlClocksEventReasons: those that hold the clock down. Idleness and a clock that an operator has set do not count.
_THROTTLES = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}
# The driver may have to start first, which takes up to 8 s on some hosts.
FIRST_ROW_S = 15.0
NEXT_ROW_S = 4.0
RETRY_S = 5.0
_LOOK_MS = 500
_LINE_BYTES = 4096


class GpuMeter:
    """One nvidia-smi while it is wanted. `measure` runs on a thread of its own, which calls it again and again; the rest never blocks.

    missing: nvidia-smi is not installed; it is not looked for again.
    """

    def __init__(self) -> None:
        self.missing = False
        self._changed = threading.Condition()
        self._is_wanted = self._is_over = False
        # Replaced whole, so that a reader on another thread needs no lock.
        self._shown: tuple[dict[str, Any], str | None] = {}, None

    @property
    def values(self) -> dict[str, Any]:
        """See gpu_of, with gpu_at_s, the wall clock's time of the row. Empty while nothing is known."""
        return self._shown[0]

    @property
    def trouble(self) -> str | None:
        """Why nvidia-smi gives no values; None if it does, is not wanted, or is not installed."""
        return self._shown[1]

    def want(self, wanted: bool) -> None:
        """Measure from now on, or no longer and forget the values."""
        with self._changed:
            if wanted is not self._is_wanted:
                self._is_wanted, self._shown = wanted, ({}, None)
                self._changed.notify_all()

    def stop(self) -> None:
        """End nvidia-smi and each `measure`, for good."""
        self.want(False)
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def measure(self) -> None:
        """Wait until it is wanted, run nvidia-smi until it is not, and return; if nvidia-smi fails or hangs, RETRY_S later."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or (self._is_wanted and not self.missing))
        if not self._goes_on:
            return
        trouble = self._run()
        if trouble is not None:
            self._show({}, trouble)
            with self._changed:
                self._changed.wait_for(lambda: not self._goes_on, RETRY_S)

    @property
    def _goes_on(self) -> bool:
        return self._is_wanted and not self._is_over

    def _run(self) -> str | None:
        """Why nvidia-smi gives no values any more; None where it is not wanted or not installed."""
        if stuck():
            # An nvidia-smi hangs already; another would hang too.
            return self.trouble or f"an earlier {PROGRAM} was killed and does not end"
        variables = {"PATH": f"{os.environ.get('PATH', os.defpath)}:{PLACES}", "LC_ALL": "C"}
        path = shutil.which(PROGRAM, path=variables["PATH"])
        if path is None:
            self.missing = True
            return None
        try:
            child = subprocess.Popen(
                ends_with_parent.command([os.path.abspath(path), *ARGUMENTS]), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, env=ends_with_parent.environment(variables), cwd="/", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return f"{PROGRAM} cannot be run: {error.strerror or error}"
        try:
            return self._follow(child)
        finally:
            let_go(child)

    def _follow(self, child: subprocess.Popen[bytes]) -> str | None:
        """Show each row, until the program ends, hangs or is no longer wanted."""
        if child.stdout is None:
            raise OSError(f"{PROGRAM} was started without a pipe")
        pipe, poll = child.stdout.fileno(), select.poll()
        poll.register(pipe, select.POLLIN)
        rest, complaint, limit_s, heard_s = b"", "", FIRST_ROW_S, time.monotonic()
        while self._goes_on:
            if poll.poll(_LOOK_MS):
                piece = os.read(pipe, 1 << 16)
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines if piece else [*lines, rest]:
                    text = line.decode(errors="replace").strip()
                    # Between two rows the driver's errors (Xid, ECC) are printed too.
                    if _is_row(text):
                        self._show(gpu_of(text) | {"gpu_at_s": time.time()}, None)
                        complaint, limit_s, heard_s = "", NEXT_ROW_S, time.monotonic()
                    elif text and not complaint:
                        complaint = text[:200]
                rest = rest[-_LINE_BYTES:]
                if not piece:
                    return _end_of(child, complaint)
            if time.monotonic() - heard_s > limit_s:
                return f"{PROGRAM} did not answer within {limit_s:g} s"
        return None

    def _show(self, values: dict[str, Any], trouble: str | None) -> None:
        with self._changed:
            if self._goes_on:
                self._shown = values, trouble


def gpu_of(row: str) -> dict[str, Any]:
    """One row, by the names of a Reading: power in watts, percent of time with a kernel running, degrees Celsius, the clock in MHz, what
    holds it down, the GPU's name. A value that is [N/A] is left out."""
    words = words_of(row)
    names = ("gpu_power_w", "gpu_busy_percent", "gpu_celsius", "gpu_clock_mhz")
    values: dict[str, Any] = {name: number for name, word in zip(names, words, strict=False) if (number := number_of(word)) is not None}
    if len(words) == len(_FIELDS) and words[5] and not words[5].startswith("["):
        values["gpu_name"] = words[5]
    if len(words) == len(_FIELDS):
        with suppress(ValueError):
            reasons = int(words[4], 16)
            values["gpu_throttled"] = [reason for bit, reason in _THROTTLES.items() if reasons & bit]
    return values


def words_of(row: str) -> list[str]:
    """The values of one row of nvidia-smi. A comma and a space end a value; a comma alone is part of a number."""
    return [word.strip() for word in row.split(", ")]


def number_of(word: str) -> float | None:
    """None for [N/A] and for what is no finite number."""
    try:
        number = float(word.replace(",", "."))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _end_of(child: subprocess.Popen[bytes], complaint: str) -> str:
    with suppress(subprocess.TimeoutExpired):
        child.wait(REAP_S)
    ended = "closed its output" if child.returncode is None else f"ended with exit code {child.returncode}"
    return f"{PROGRAM} {ended}{': ' + complaint if complaint else ''}"


def _is_row(text: str) -> bool:
    return len(words_of(text)) >= len(_FIELDS)
