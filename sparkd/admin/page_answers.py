"""Owns the types of what the page alone asks for: its stream and its figures, how a model started, how it is set, what is on the disks."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, create_model


class EnginePage(BaseModel):
    """text: in Prometheus's text format."""

    text: str


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
    held: dict[str, Any]
    notes: list[str]
