"""The one daemon of a session of tests. Each file of tests brings its own models, and each test the state that it needs."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.stub import stub_engine
from tests.support.daemon_process import DaemonProcess
from tests.support.stream import Stream, asking
from tests.support.waiting import until

CANARY = "canary-7f3a91"
KEY, ADMIN_KEY = f"{CANARY}-key-of-a-laptop", f"{CANARY}-key-of-the-boss"
USER = {"authorization": f"Bearer {KEY}"}
BACKOFF = {"initial_s": 0.2, "max_s": 1, "jitter": 0}


class Stage(DaemonProcess):
    """A daemon with keys and real Ray, whose client holds the admin's key."""

    def __init__(self, folder: Path) -> None:
        (folder / "model").mkdir()
        self._shared: dict[str, Any] = {
            "keys": {"inference": [{"laptop": KEY}], "admin": [f"boss: {ADMIN_KEY}"]},
            "engine": stub_engine() | {"stop_timeout_s": 2},
            "backoff": BACKOFF,
            "min_residency_s": 0,
            "swap_idle_s": 0,
        }
        self.given = self._shared
        super().__init__(folder, self._shared)
        self.client.headers["authorization"] = f"Bearer {ADMIN_KEY}"

    def configure(self, settings: dict[str, Any]) -> None:
        super().configure(settings)
        self.config.chmod(0o600)

    def entry(self, **keys: Any) -> dict[str, Any]:
        """A model of the configuration, of 1 GiB where `keys` say nothing else."""
        return {"model": str(self.folder / "model"), "memory_gib": 1} | keys

    def gate(self, name: str) -> Path:
        """A file that does not exist, for the stub engine to wait for."""
        path = self.folder / f"{name}.gate"
        path.unlink(missing_ok=True)
        return path

    @contextlib.contextmanager
    def serving(self, models: dict[str, dict[str, Any]], **settings: Any) -> Iterator[None]:
        """The models of one file of tests; nothing of theirs is left at the end."""
        self.reload(self._shared | {"models": models} | settings)
        try:
            yield
        finally:
            self.reload(self._shared)
            until(lambda: not self.get("/admin/v1/models")["models"] and not self.status()["nodes"][0]["reserved_gib"], "no model is left")

    def reload(self, given: dict[str, Any]) -> dict[str, Any]:
        """The configuration from now on, and what the daemon says that it changed."""
        self.given = given
        self.configure(given)
        answer = self.client.post("/admin/v1/reload")
        answer.raise_for_status()
        return dict(answer.json())

    def ready(self, name: str) -> dict[str, Any]:
        """READY, whatever it was before."""
        if self.model(name)["want"] != "RUNNING":
            self.load(name)
        return self.wait_for(name, "READY")

    def stopped(self, *names: str) -> None:
        for name in names:
            if self.model(name)["state"] != "STOPPED":
                self.unload(name)
        for name in names:
            self.wait_for(name, "STOPPED")

    def settle(self) -> None:
        """No model starts, ends or fails: those that do are stopped."""
        models = self.get("/admin/v1/models")["models"]
        self.stopped(*(model["name"] for model in models if model["state"] not in ("READY", "STOPPED")))

    def ended(self, operation: str) -> dict[str, Any]:
        """How an operation ended."""

        def look() -> dict[str, Any] | None:
            answer = dict(self.get(f"/admin/v1/operations/{operation}") or {"state": "RUNNING"})
            return answer if answer["state"] != "RUNNING" else None

        return until(look, "the operation ended") or {}

    def last_seq(self) -> int:
        """Of the newest event."""
        events = self.get("/admin/v1/events?limit=1")["events"]
        return int(events[-1]["seq"]) if events else 0

    def events(self, after: int, kind: str) -> list[str]:
        """The models of all events of one kind behind the one numbered `after`."""
        events = self.get(f"/admin/v1/events?limit=1000&after={after}")["events"]
        return [event["model"] for event in events if event["kind"] == kind]

    def stream(self, model: str, **fields: Any) -> Stream:
        return Stream(self.url, model, USER, **fields)

    def client_of(self, model: str, **fields: Any) -> contextlib.AbstractContextManager[None]:
        return asking(self.port, model, USER, **fields)


def stored(made: DaemonProcess) -> list[str]:
    """Ids of the requests in its record that are on disk."""
    with contextlib.closing(sqlite3.connect(f"file:{made.state_dir / 'state.db'}?mode=ro", uri=True)) as db:
        return [row[0] for row in db.execute("SELECT request_id FROM requests ORDER BY number")]
