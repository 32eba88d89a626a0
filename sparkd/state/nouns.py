"""The nouns of the control plane."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from workers.rank.signatures import Diagnosis

# The name of a node's address in the admin API, for pydantic, which takes a field's metadata as its own.
AS_NODE: Mapping[str, Any] = {"serialization_alias": "node"}


class Want(StrEnum):
    """The wish for a model."""

    RUNNING = "RUNNING"
    STOPPED = "STOPPED"


@dataclass(frozen=True, slots=True)
class Desired:
    """The desired state of one model.

    generation: grows with every change
    by: its origin: config, admin, request, ttl, or retry: an admin whose request has failed since and who has seen the failure
    """

    model: str
    want: Want
    generation: int
    by: str
    since_s: float


@dataclass(frozen=True, slots=True)
class RankHandle:
    """Enough to find one rank again after everything else was restarted. The admin API shows it, but for the path of its key.

    pid: the rank's shim. Together with the next two it names one process for ever
    start_ticks: its start time in clock ticks since boot (field 22 of /proc/PID/stat)
    boot_id: the kernel's
    socket_path: set where the rank listens on a Unix socket, else host and port
    world: how many ranks its model has
    attempt: the start that they belong to, which is rank 0's rank_id; empty of a rank alone
    memory_gib: what was reserved for it on its node; 0 where an earlier release started it
    parsers: the fields of a sparkd.vllm.parsers.Parsers; None where an earlier release started it, or it is no vLLM
    """

    rank_id: str
    model: str
    generation: int
    node_id: str = field(metadata=AS_NODE)
    rank: int
    pid: int
    start_ticks: int
    boot_id: str
    socket_path: str | None
    host: str | None
    port: int | None
    api_key_path: str | None = field(metadata={"exclude": True})
    config_hash: str
    log_path: str
    started_at_s: float
    world: int = 1
    attempt: str = ""
    memory_gib: int = 0
    parsers: Mapping[str, str | None] | None = None

    @property
    def start(self) -> str:
        """The part of its name that the ranks of one start alone have in common."""
        return self.attempt or self.rank_id


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank is. Fields are None where neither its log nor its loader has said; eta_s only where measured points give it.

    From units_done on they are the loader's own (workers.rank.report).

    kv_gib, kv: how the KV cache was sized, as the worker says (workers.rank.report.cache_of), or where vLLM sized it its log
    lost: which process inside the engine is gone
    error_at_s: when last_error came, by the node's wall clock
    line_at_s: of its last line, by the same clock
    began_s: when each part of the start began, by the same clock (workers.rank.report.began_of)
    units_done, units_total: tensors and experts
    read_bytes: from the disk, whole blocks
    source: `checkpoint` or `cache`, before them `calibration` while the inputs of layers are measured
    cache_state: of the quantized cache that is written beside the load: none, writing, written, failed or skipped
    cache_why: why it failed or was skipped, or why the load waits for its disk
    failure: why the load ended
    failure_lasts: the next one will end the same way
    """

    phase: str = "starting"
    fraction: float | None = None
    bytes_done: int | None = None
    bytes_total: int | None = None
    eta_s: float | None = None
    weights_gib: float | None = None
    kv_tokens: int | None = None
    kv_gib: float | None = None
    server_up: bool = False
    last_error: str | None = None
    lost: str | None = None
    error_at_s: float | None = None
    line_at_s: float | None = None
    began_s: Mapping[str, float] = field(default_factory=dict)
    units_done: int | None = None
    units_total: int | None = None
    bytes_per_s: float | None = None
    read_bytes: int | None = None
    source: str | None = None
    format: str | None = None
    cache_state: str | None = None
    cache_bytes: int | None = None
    cache_why: str | None = None
    failure: str | None = None
    failure_lasts: bool = False
    kv: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RankFact:
    """An agent's observation of one rank: a handle, whether its processes live, and how it ended.

    halted: a signal has stopped a process of it (SIGSTOP): it lives and will never answer
    deaf: its server was up, and its socket's file has been removed, so no request can reach it
    cpu_s: CPU seconds of all its processes
    cause_age_s: for how long its log or its loader has named an error, by its node's own clock: comparable between nodes
    killed: the guard's sentence, where it was the guard
    host_bytes: anonymous memory
    device_bytes: as nvidia-smi says
    """

    handle: RankHandle
    alive: bool
    processes: int
    exit_code: int | None
    stop_ordered: bool
    progress: Progress
    halted: bool = False
    deaf: bool = False
    cpu_s: float = 0.0
    cause_age_s: float | None = None
    diagnosis: Diagnosis | None = None
    killed: str | None = None
    host_bytes: int | None = None
    device_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at a node's memory, bytes.

    at_s: the node's wall clock
    age_s: how old it was when it came in
    unaccounted_bytes: what no line of /proc/meminfo has, so the driver's
    slope_bytes_per_s: of MemAvailable in the last second
    floor_in_s: until the guard's floor at that pace, None where memory does not go
    scanned_per_s, swapped_per_s: pages
    level: ok, tight, pressed or critical
    guarded: whether a guard watches that kills where it must; None where none is to, or of an agent that does not say
    gpu_at_s: the node's wall clock when nvidia-smi printed the GPU's values
    gpu_throttled: what holds the GPU's clock down (workers.guard.gpu_meter), empty where nothing does
    """

    node_id: str = field(metadata=AS_NODE)
    at_s: float
    mem_total_bytes: int
    mem_available_bytes: int
    mem_free_bytes: int
    cached_bytes: int
    swap_total_bytes: int
    swap_free_bytes: int
    cma_total_bytes: int | None = None
    cma_free_bytes: int | None = None
    psi_some_avg10: float | None = None
    psi_full_avg10: float | None = None
    age_s: float = 0.0
    unaccounted_bytes: int | None = None
    slope_bytes_per_s: float = 0.0
    floor_in_s: float | None = None
    scanned_per_s: float = 0.0
    swapped_per_s: float = 0.0
    level: str = "ok"
    level_why: str | None = None
    guarded: bool | None = None
    device_trouble: str | None = None
    gpu_at_s: float | None = None
    gpu_power_w: float | None = None
    gpu_busy_percent: float | None = None
    gpu_celsius: float | None = None
    gpu_clock_mhz: float | None = None
    gpu_throttled: tuple[str, ...] | None = None
    gpu_name: str | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """A node besides its memory: its host name, seconds since its boot, and the disk that its logs are on."""

    host: str
    uptime_s: float | None = None
    disk_total_bytes: int | None = None
    disk_free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes that the engine of a model holds on one node: anonymous memory of the host, memory of the device."""

    model: str
    node: str
    host_bytes: int | None
    device_bytes: int | None


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a model is not loaded now.

    reason: a CamelCase word of sparkd.control.scheduler or sparkd.control.evictions, or that of a condition.
    models: the models that it waits for, or that are in its way.
    """

    reason: str
    message: str
    models: tuple[str, ...] = ()

    def is_as(self, other: Wait | None) -> bool:
        """Whether reason and models are the same. The message also tells the seconds that are left, which change."""
        return other is not None and (self.reason, self.models) == (other.reason, other.models)


class OperationState(StrEnum):
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


@dataclass(frozen=True, slots=True)
class Operation:
    """A long action that was requested: its kind, its model, its progress and its end."""

    id: str
    kind: str
    model: str
    state: OperationState
    message: str
    created_at_s: float
    finished_at_s: float | None = None
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """One line of history: state changes, restarts, adoptions, refusals. `seq` orders them without gaps."""

    seq: int
    at_s: float
    kind: str
    model: str | None
    message: str
    data: Mapping[str, Any] = field(default_factory=dict)


def by_cause(facts: Iterable[RankFact]) -> list[RankFact]:
    """The ranks of one look by their errors, the first error first; before it those that ended without one."""
    return sorted(facts, key=lambda fact: float("-inf") if fact.cause_age_s is None else -fact.cause_age_s)
