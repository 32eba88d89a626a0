"""The bench that runs: its result so far, the lines that tell how far it is, and a model that it waits for."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparkd.bench.client import Client, Model
from sparkd.bench.figures import one_line
from sparkd.bench.result import BenchResult, BenchStore
from sparkd.errors import RankError
from sparkd.gateway.routes import model_path
from sparkd.state.model_state import STARTING, ModelState

READY_S = 3600.0
POLL_S = 0.5
# An engine that has just died is READY until the supervisor looks.
SEEN_S = 15.0
MOST_EVENTS = 1000


class RunningBench:
    """
    state_dir: of the daemon.
    key: for the requests of llama-benchy.
    """

    def __init__(self, client: Client, state_dir: Path, result: BenchResult, base_url: str = "", key: str = "") -> None:
        self.client, self.result = client, result
        self.base_url, self.key = base_url, key
        self._store = BenchStore(state_dir)

    @property
    def model(self) -> str:
        return self.result.subject.model

    async def keep(self, **fields: Any) -> None:
        """Fields of the result that changed. Raises StateError where the disk is full."""
        self.result = self.result.model_copy(update=fields)
        await asyncio.to_thread(self._store.write, self.result)

    def tell(self, message: str, fraction: float | None = None, phase: str = "measuring") -> None:
        """The operation's message, as a line for the daemon.

        fraction: of the whole bench, 0 to 1.
        """
        say({"message": message, "fraction": fraction, "phase": phase})

    async def ready(self, model: str | None = None, *, once: bool = False) -> Model:
        """Load the model if it is not READY, and return it as GET /models has it.

        once: a load that fails is not tried again.

        Raises RankError where it fails, or is not READY within READY_S.
        """
        name = model or self.model
        if (await self.client.model(name))["state"] != ModelState.READY:
            await self.client.post(f"{model_path(name)}/load")
        try:
            async with asyncio.timeout(READY_S):
                # An engine that was killed a moment ago is READY until that is seen.
                while (view := await self.client.model(name))["state"] != ModelState.READY or await self.client.counters(name) is None:
                    if view["state"] == ModelState.FAILED and (once or view["retry_in_s"] is None):
                        raise RankError(f"{name} cannot be measured, because it does not load: {view['message']}")
                    if not once:
                        self.tell(f"{name} is loading", phase="loading")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            message = f"{name} cannot be measured, because it was not ready within {READY_S:,.0f} s: `sparkd ps` says what it waits for."
            raise RankError(message) from None
        return view

    async def newest_event(self) -> int:
        """The sequence number of the newest event, from which `engine_failure` looks."""
        events = (await self.client.get("/events", limit=1))["events"]
        return int(events[-1]["seq"]) if events else 0

    async def engine_failure(self, model: str, since_seq: int) -> str | None:
        """Why the model's engine failed after this event, in one line; None where it did not."""
        with suppress(TimeoutError, RankError):
            async with asyncio.timeout(SEEN_S):
                while True:
                    failed = await self._failed(model, since_seq)
                    if failed is not None or not await self._is_dead(model):
                        return failed
                    await asyncio.sleep(POLL_S)
        return None

    async def _failed(self, model: str, since_seq: int) -> str | None:
        # 0 asks for the newest ones.
        events = (await self.client.get("/events", after=since_seq, limit=MOST_EVENTS))["events"]
        failures = [event["message"] for event in events if event["kind"] == "failed" and event["model"] == model]
        return one_line(f"{model} failed: {failures[-1]}") if failures else None

    async def _is_dead(self, model: str) -> bool:
        """Whether an engine that the supervisor takes for READY gives no counters."""
        view = (await self.client.models()).get(model)
        return view is not None and view["state"] == ModelState.READY and await self.client.counters(model) is None


def say(event: Mapping[str, Any]) -> None:
    """A line for the daemon."""
    sys.stdout.write(f"{json.dumps(event)}\n")
    sys.stdout.flush()


def loads_beside(models: Collection[Model], *ours: str | None) -> list[str]:
    """Other models that load. One that is only PLANNED may still be refused, and has taken nothing from anybody."""
    loading = STARTING - {ModelState.PLANNED}
    return [model["name"] for model in models if model["state"] in loading and model["name"] not in ours]
