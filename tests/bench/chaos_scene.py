"""One Spark under chaos: a supervised daemon, its Ray and its engines, where to hit them and what is left. Never says what is bad."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.stub import stub_engine
from tests.support.activated import ActivatedDaemon
from tests.support.processes import alive, command_of, parent_of, session_of, text_of
from tests.support.stream import Stream, answers
from tests.support.waiting import until

MODEL = "m"
RANK = "SPARKD_RANK_ID="
_RAY = ("gcs_server", "raylet", "ray::Agent")
# Everything must be well again within that time: a head of Ray takes up to a minute on busy cores.
WELL_S = 150.0
CLEAN_S = 60.0


class Scene:
    """The model is MODEL. patience: how many times longer than the stub's an engine's start may take. disk: where the state directory has
    one of its own."""

    def __init__(self, daemon: ActivatedDaemon, patience: float = 1.0) -> None:
        self.daemon = daemon
        self._patience = patience
        self.disk: SmallDisk | None = None

    # What there is.

    def ranks(self) -> dict[int, list[int]]:
        """By session, which is the shim's number, the living processes of every rank of this daemon."""
        found: dict[int, list[int]] = {}
        mark = str(self.daemon.runtime_dir)
        for pid in psutil.pids():
            if RANK in (text := text_of(pid)) and mark in text and alive(pid):
                found.setdefault(session_of(pid), []).append(pid)
        return found

    def present(self) -> int:
        """The shim of the rank that the daemon knows; 0 for none."""
        ranks = self.daemon.model(MODEL).get("ranks") or []
        return int(ranks[0]["pid"]) if ranks else 0

    def answers(self) -> bool:
        return answers(self.daemon.client, MODEL)

    def well(self, wanted: str = "READY", without: frozenset[int] = frozenset()) -> float | None:
        """Seconds until the model is as wished, Ray is connected, its agent answers, and nothing of Ray is one of `without`, which were
        killed; None where that never came."""
        began_s = time.monotonic()

        def look() -> bool:
            """What costs the least is asked first: what Ray costs takes a tenth of a second to add up."""
            if self.daemon.model(MODEL).get("state") != wanted:
                return False
            nodes = (self.daemon.get("/admin/v1/nodes") or {}).get("nodes") or [{}]
            if not nodes[0].get("agent") or self.ranks().keys() - {self.present()}:
                return False
            if wanted == "READY" and not self.answers():
                return False
            status = self.daemon.status()
            parts = {one["name"]: int(one["pid"]) for one in status.get("costs", {}).get("ray", [])}
            back = all(any(name.startswith(one) for name in parts) for one in _RAY) and not without & set(parts.values())
            return back and bool(status["settled"] and status["cluster"].get("connected"))

        try:
            until(look, "all is well", 0.25, limit_s=WELL_S * self._patience)
        except AssertionError:
            return None
        return time.monotonic() - began_s

    def reach(self, state: str) -> bool:
        """Bring the model into a state, or one that follows it: a busy machine may pass through one between two looks."""
        order = ("LOADING", "WARMING", "SIZING", "READY")
        if state == "READY":
            return self.well() is not None
        self.daemon.unload(MODEL)
        if self.well("STOPPED") is None:
            return False
        self.daemon.load(MODEL)
        reached = order[order.index(state) :]
        with suppress(AssertionError):
            until(lambda: self.daemon.model(MODEL).get("state") in reached and self.present(), state, 0.02, limit_s=60 * self._patience)
            return True
        return False

    def streams(self, count: int) -> list[Stream]:
        """All of which have begun."""
        asked = [Stream(self.daemon.url, MODEL, max_tokens=40).ask() for _ in range(count)]
        until(lambda: all(stream.began.is_set() for stream in asked), "streams begin")
        return asked

    # Where to hit. Each returns the processes that it killed; none is a fault that hit nothing.

    def shim(self) -> frozenset[int]:
        return _kill([self.present()])

    def api_server(self) -> frozenset[int]:
        """The shim's child."""
        shim = self.present()
        return _kill([pid for pid in self.ranks().get(shim, []) if parent_of(pid) == shim])

    def engine_core(self) -> frozenset[int]:
        """The last of what the API server has started, or what calls itself so."""
        shim = self.present()
        members = self.ranks().get(shim, [])
        named = [pid for pid in members if any("EngineCore" in word for word in command_of(pid))]
        below = [pid for pid in members if pid != shim and parent_of(pid) != shim and parent_of(pid) in members]
        return _kill(named[:1] or below[-1:])

    def of_ray(self, name: str) -> Callable[[], frozenset[int]]:
        def hit() -> frozenset[int]:
            costs = self.daemon.status().get("costs", {})
            return _kill([int(one["pid"]) for one in costs.get("ray", []) if one["name"].startswith(name)])

        return hit

    def kill_daemon(self) -> frozenset[int]:
        pids = [self.daemon.process.pid] if self.daemon.process else []
        self.daemon.kill()
        return frozenset(pids)


def _kill(pids: list[int]) -> frozenset[int]:
    for pid in filter(None, pids):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return frozenset(pids) - {0}


def ended_well(stream: Stream) -> bool:
    return stream.ended.wait(CLEAN_S) and stream.clean


class SmallDisk:
    """A state directory on a file system of its own, which can be filled and made read-only. Needs root."""

    def __init__(self, at: Path) -> None:
        at.mkdir(parents=True, exist_ok=True)
        self._at = at
        self._covered = False
        self._call("mount", "-t", "tmpfs", "-o", "size=64m,mode=0700", "tmpfs", str(at))

    def fill(self) -> None:
        with suppress(OSError), (self._at / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))

    def drain(self) -> None:
        (self._at / "filler").unlink(missing_ok=True)

    def writable(self, yes: bool) -> None:
        """Read-only for whoever opens a file from now on; engines that run have their logs open."""
        if yes and self._covered:
            self._call("umount", "-l", str(self._at))
        elif not yes:
            self._call("mount", "--bind", str(self._at), str(self._at))
            self._call("mount", "-o", "remount,bind,ro", str(self._at))
        self._covered = not yes

    def close(self) -> None:
        self._call("umount", "-l", str(self._at))

    def _call(self, *words: str) -> None:
        subprocess.run(words, check=True, capture_output=True, timeout=30)


def settings(folder: Path, *, stub: bool, model: Path | None) -> dict[str, Any]:
    """Of a daemon with one model; the stub takes two seconds for a start, long enough to be hit in each state of it."""
    (folder / "model").mkdir(exist_ok=True)
    spec: dict[str, Any] = {"model": str(model or folder / "model"), "memory_gib": 1, "preload": True}
    engine: dict[str, Any] = {"stop_timeout_s": 3}
    if stub:
        engine |= stub_engine()
        spec["env"] = {
            "SPARKD_STUB_START_DELAY_S": "2", "SPARKD_STUB_CHILDREN": "2", "SPARKD_STUB_CORE": "1", "SPARKD_STUB_TOKENS": "40",
            "SPARKD_STUB_CHUNK_INTERVAL_S": "0.05",
        }  # fmt: skip
    else:
        spec |= {"memory_gib": 3, "max_model_len": 1024, "max_num_seqs": 8, "kv_cache": {"bytes": 256 << 20}}
    backoff = {"initial_s": 0.2, "max_s": 1, "jitter": 0}
    return {"engine": engine, "backoff": backoff, "unload_timeout_s": 10, "models": {MODEL: spec}}
