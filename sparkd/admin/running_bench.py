"""Owns the bench that runs: its result so far, its file, what its operation says, and a model that it waits for."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sparkd import __version__
from sparkd.bench.result import BenchResult, BenchStore, BenchSubject, Cell, Kind, Predicted, Published
from sparkd.control.journal import Ledger
from sparkd.errors import RankError
from sparkd.execution.boundary import Boundary
from sparkd.gateway.rates import Sample as Counters
from sparkd.state.nouns import STARTING, Event, ModelState, Operation, Progress, Want
from sparkd.state.snapshot import ModelView, Snapshot

KIND = "bench"
READY_S = 3600.0
POLL_S = 0.5
# An engine that has just died is READY until the supervisor looks, and the guard writes its incident once the memory is back.
SEEN_S = 15.0
MOST_EVENTS = 1000

Counting = Callable[[str], Awaitable[Counters | None]]


@dataclass(frozen=True, slots=True)
class BenchedModel:
    """source: folder or hub id; folder: its files here; checkpoint: their identity; entry: as configured, secrets masked; vllm, driver:
    versions; published: figures of its recipe; interpreter: the Python of its engine."""

    source: str
    folder: str | None = None
    checkpoint: str | None = None
    entry: Mapping[str, Any] = field(default_factory=dict)
    vllm: str | None = None
    driver: str | None = None
    published: tuple[Published, ...] = ()
    interpreter: str = sys.executable


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts of the daemon that a bench needs.

    counters: an engine's, asked now; kv_use: the share of a model's KV cache that is used, as was seen last; key: of the daemon's own
    requests; predict: what `sparkd plan` says of a model, raises SparkdError; learn: keeps the rates that a result shows, blocks.
    incident: the id of the memory guard's incident of an engine's start; None where none is written yet.
    start_of: the last start of a model (sparkd.admin.starts.Starts.of); forget: removes its quantized weights; is_kept: whether there are
    any; disk_rate: bytes a second at which the disk gives its files, None where they are not here, blocks for seconds.
    lend: add a model beside this one, with a suffix for its name and another `quantize`, until take_back; check_lendable: raises
    SparkdError for a model that has no unquantized form, blocks.
    """

    snapshot: Callable[[], Snapshot]
    want: Callable[[str, Want, str], Operation | None]
    counters: Counting
    kv_use: Callable[[str], float | None]
    model: Callable[[str], BenchedModel]
    predict: Callable[[str], Awaitable[Predicted | None]]
    learn: Callable[[BenchResult], None]
    incident: Callable[[str], Awaitable[str | None]]
    start_of: Callable[[str], dict[str, Any]]
    forget: Callable[[str], Awaitable[None]]
    is_kept: Callable[[str], Awaitable[bool]]
    disk_rate: Callable[[str], float | None]
    check_lendable: Callable[[str], None]
    lend: Callable[[str, str, Any], str]
    take_back: Callable[[str], None]
    base_url: str
    key: str


class RunningBench:
    """result: newer than its file. folder: of the results."""

    def __init__(
        self, around: Surroundings, ledger: Ledger, folder: Path, wall: Callable[[], float], boundary: Boundary, result: BenchResult
    ) -> None:
        self.around, self.folder, self.wall, self.boundary = around, folder, wall, boundary
        self.result = result
        self.operation = ledger.operations.open(KIND, result.subject.model, "admin")
        self._ledger, self._store = ledger, BenchStore(folder)

    def keep(self, **fields: Any) -> None:
        """Fields of the result that changed."""
        self.result = self.result.model_copy(update=fields)

    async def save(self) -> None:
        """Raises StateError where the disk is full."""
        await asyncio.to_thread(self._store.write, self.result)

    def tell(self, message: str, fraction: float | None = None, phase: str = "measuring") -> None:
        """The operation's message. fraction: of the whole bench, 0 to 1."""
        self._ledger.operations.tell(self.operation.id, message, Progress(phase=phase, fraction=fraction))

    def view(self, model: str | None = None) -> ModelView:
        """The bench's model, or another one. Raises RankError where the registry lacks it."""
        name = model or self.result.subject.model
        view = self.around.snapshot().models.get(name)
        if view is None:
            raise RankError(f"{name} is configured no more.")
        return view

    async def ready(self, model: str | None = None, *, once: bool = False) -> None:
        """Load the model where it is not. once: it is not tried again. Raises RankError where it fails, or is not READY within READY_S."""
        name = self.view(model).name
        if self.view(name).state != ModelState.READY:
            self.around.want(name, Want.RUNNING, KIND)
        try:
            async with asyncio.timeout(READY_S):
                # An engine that was killed a moment ago is READY until that is seen.
                while (view := self.view(name)).state != ModelState.READY or await self.around.counters(name) is None:
                    if view.state == ModelState.FAILED and (once or view.retry_in_s is None):
                        raise RankError(f"{name} cannot be measured, because it does not load: {view.message}")
                    if not once:
                        self.tell(f"{name} is loading", phase="loading")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            message = f"{name} cannot be measured, because it was not ready within {READY_S:,.0f} s: `sparkd ps` says what it waits for."
            raise RankError(message) from None

    def newest_event(self) -> int:
        """The sequence number of the newest event, from which `engine_failure` looks."""
        return self._ledger.feed.behind_newest(0)

    async def engine_failure(self, model: str, since_seq: int) -> str | None:
        """Why the model's engine failed after this event, in one line; None where it did not."""
        failed: Event | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(SEEN_S):
                while True:
                    failed = self._failed(model, since_seq)
                    if failed is None:
                        if not await self._is_dead(model):
                            return None
                    elif failed.data["reason"] != "MemoryGuard":
                        break
                    elif incident := await self.around.incident(str(failed.data["start"])):
                        return f"The memory guard killed {model}: `sparkd incidents show {incident}`."
                    await asyncio.sleep(POLL_S)
        return None if failed is None else f"{model} failed: {failed.data['reason']}. `sparkd events` says more."

    def _failed(self, model: str, since_seq: int) -> Event | None:
        events = self._ledger.events(since_seq, MOST_EVENTS)
        return next((event for event in reversed(events) if event.kind == "failed" and event.model == model), None)

    async def _is_dead(self, model: str) -> bool:
        """Whether an engine that the supervisor takes for READY gives no counters."""
        view = self.around.snapshot().models.get(model)
        return view is not None and view.state is ModelState.READY and await self.around.counters(model) is None


class BenchWork(Protocol):
    """The measurement that a bench runs. profile: its name in the result; tool: with its version; text: that the prompts come from; cells:
    that it will measure."""

    @property
    def kind(self) -> Kind: ...
    @property
    def profile(self) -> str: ...
    @property
    def tool(self) -> str: ...
    @property
    def text(self) -> str | None: ...
    @property
    def cells(self) -> tuple[Cell, ...]: ...

    async def run(self, bench: RunningBench) -> str:
        """Measure, and keep each figure as soon as it is known. Returns a line about the whole. Raises SparkdError."""


def loads_beside(snapshot: Snapshot, *ours: str | None) -> list[str]:
    """Other models that load. One that is only PLANNED may still be refused, and has taken nothing from anybody."""
    loading = STARTING - {ModelState.PLANNED}
    return [view.name for view in snapshot.models.values() if view.state in loading and view.name not in ours]


def subject_of(view: ModelView, model: BenchedModel, snapshot: Snapshot) -> BenchSubject:
    everywhere = snapshot.nodes
    nodes = {rank.node_id for rank in view.ranks} or {node.node_id for node in everywhere}
    readings = [node.reading for node in everywhere if node.reading and node.node_id in nodes]
    gpus = sorted({reading.gpu_name for reading in readings if reading.gpu_name})
    quantize = view.quantize
    return BenchSubject(
        model=view.name,
        source=model.source,
        checkpoint=model.checkpoint,
        entry=dict(model.entry),
        format=str(quantize.get("format")) if isinstance(quantize, Mapping) else quantize,
        vllm=model.vllm,
        driver=model.driver,
        sparkd=__version__,
        gpu=", ".join(gpus) or None,
        nodes=sorted(nodes),
    )
