"""Owns the types of what the page alone asks for: its stream and its figures, how a model started, how it is set, what is on the disks."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, create_model

from sparkd.admin.answers import Cable, RankBody, ReadingBody, body_of
from sparkd.condition import Condition
from sparkd.gateway.rates import Rates
from sparkd.state.nouns import Operation
from sparkd.state.snapshot import ModelView, NodeView


class EnginePage(BaseModel):
    """text: in Prometheus's text format."""

    text: str


class LiveLimits(BaseModel):
    """The guard's marks on a node's memory, bytes of MemAvailable."""

    soft: int
    hard: int
    floor: int


class LiveEngine(BaseModel):
    model: str
    host_bytes: int | None
    device_bytes: int | None


class LiveDisk(BaseModel):
    total_bytes: int
    free_bytes: int


class LiveGpu(BaseModel):
    """The first GPU of a node with an engine."""

    name: str | None
    power_w: float | None
    busy_percent: float | None
    celsius: float | None
    clock_mhz: float | None
    throttled: list[str] | None = Field(description="What holds the clock down; empty where nothing does")


LiveNode = body_of(
    "LiveNode",
    NodeView,
    "One node, with what the page draws of it. released_bytes: memory of engines that ended which has not come back.",
    ("machine",),
    reading=ReadingBody | None,
    node=str,
    limits=LiveLimits | None,
    engines=list[LiveEngine],
    reserved_bytes=int,
    released_bytes=int,
    host=str | None,
    uptime_s=float | None,
    disk=LiveDisk | None,
    gpu=LiveGpu | None,
)
LiveRates = body_of(
    "LiveRates",
    Rates,
    "One engine over the last 10 s, latencies over the last 30. joules_per_token is of its GPUs, where no other engine shares them.",
    joules_per_token=float | None,
)
LiveModel = body_of(
    "LiveModel",
    ModelView,
    "One model, with what its engine does.",
    ranks=list[RankBody],  # type: ignore[valid-type]
    pin=bool,
    rates=LiveRates | None,
)


class LiveCable(Cable):
    """Nodes by their addresses. rate_gb_s: measured last, where it holds; problem: the worst finding, with what helps."""

    rate_gb_s: float | None
    verdict: str
    problem: str | None


class LiveEvents(BaseModel):
    last_seq: int


class LiveIncidents(BaseModel):
    last_id: str | None


class LiveDocument(BaseModel):
    """The page's data. The stream sends it once, then JSON merge patches: there null removes a member, which is then unknown."""

    boot: str = Field(description="Another after each start of the daemon")
    version: str
    at_s: float
    settled: bool
    draining: bool
    conditions: list[Condition]
    nodes: dict[str, LiveNode]  # type: ignore[valid-type]
    models: dict[str, LiveModel]  # type: ignore[valid-type]
    operations: dict[str, Operation]
    cables: list[LiveCable]
    events: LiveEvents
    incidents: LiveIncidents


class SeriesAnswer(BaseModel):
    """series: by name, a number for each step_s, the last at end_s; null where there is none."""

    step_s: int
    end_s: float
    series: dict[str, list[float | None]]


class DiskEntry(BaseModel):
    """kind: hub, quantized or profile. used_s: wall clock; used_by: models that are configured with it. valid: null where that has no
    meaning; fault: why it cannot be used as it is."""

    kind: str
    id: str
    node: str
    name: str
    size_bytes: int
    used_s: float | None
    used_by: list[str]
    valid: bool | None
    fault: str | None


class DiskFolder(BaseModel):
    kind: str
    node: str
    path: str
    size_bytes: int
    free_bytes: int | None
    limit_bytes: int | None


class DiskAnswer(BaseModel):
    entries: list[DiskEntry]
    folders: list[DiskFolder]


class RemovedEntry(BaseModel):
    kind: str
    id: str
    node: str
    freed_bytes: int


class StartPhase(BaseModel):
    """begin_s: after the start began; seconds: null while it goes on. bytes: read from the disk in it, null if its loader does not say.

    A loader that quantizes reads in `quantize`. vLLM's own loader tells the size of the weights when it has loaded them.
    """

    name: str
    begin_s: float
    seconds: float | None
    bytes: int | None
    bytes_per_s: float | None


class StartAnswer(BaseModel):
    """The last start that this run of the daemon has seen. seconds: null while it goes on; ended: READY, FAILED or STOPPED."""

    model: str
    began_s: float | None
    seconds: float | None
    ended: str | None
    phases: list[StartPhase]
    disk_bytes_per_s: float | None = Field(
        description="The disk rate of such a node; where it is unknown, the fastest read rate of this load"
    )


class RankSettings(BaseModel):
    """command: as it was started; engine: the arguments that vLLM itself says are not its defaults. Null without an engine."""

    rank: int
    node: str
    command: list[str] | None
    engine: dict[str, Any] | None


class SettingsAnswer(BaseModel):
    """configured: the entry as it was given, `recipe` and not what it brings, by our names of keys; PUT takes it back. resolved: every key,
    with those of its recipe and the defaults. Values of `env` are masked."""

    configured: dict[str, Any]
    resolved: dict[str, Any]
    ranks: list[RankSettings]


# `class` is no name of an attribute.
LayerClass = create_model(
    "LayerClass",
    __doc__="Tensors that differ in a number of their names only. class: what they are; result_bytes: null where loading would fail.",
    **{"class": (str, ...)},  # type: ignore[call-overload]
    name=(str, ...),
    count=(int, ...),
    shape=(list[int], ...),
    dtype=(str, ...),
    bytes=(int, ...),
    format=(str | None, ...),
    result_bytes=(int | None, ...),
    refused=(str | None, ...),
)


class LayersAnswer(BaseModel):
    """As `sparkd ls --layers` prints it."""

    folder: str
    quantization: str | None
    quantize: dict[str, Any]
    layers: list[LayerClass]  # type: ignore[valid-type]
    count: int
    bytes: int
    result_bytes: int | None
    held: dict[str, Any] | None
    notes: list[str]
