"""The nouns of the control plane, the one table of legal state changes, and their SQLite store. Never decides, never talks to a node."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from sparkd.errors import StateError
from workers.signatures import Diagnosis

SCHEMA_VERSION = 1
EVENTS_KEPT = 5000
OPERATIONS_KEPT = 500


class Want(StrEnum):
    """What somebody asked for."""

    RUNNING = "RUNNING"
    STOPPED = "STOPPED"


class ModelState(StrEnum):
    """Where a model is. Only the supervisor assigns it, and only along LEGAL."""

    STOPPED = "STOPPED"
    PLANNED = "PLANNED"
    LOADING = "LOADING"
    WARMING = "WARMING"
    SIZING = "SIZING"
    READY = "READY"
    DRAINING = "DRAINING"
    STOPPING = "STOPPING"
    FAILED = "FAILED"


STARTING = frozenset({ModelState.PLANNED, ModelState.LOADING, ModelState.WARMING, ModelState.SIZING})
RESIDENT = STARTING - {ModelState.PLANNED} | {ModelState.READY, ModelState.DRAINING, ModelState.STOPPING}

# An adopted rank enters at LOADING; it is READY once its server answers and it has answered a question, now or before. Stock vLLM
# warms and sizes in one breath and old releases say neither in the log, so the three starting states may be passed over forwards,
# never backwards.
_S = ModelState
LEGAL: Mapping[ModelState, frozenset[ModelState]] = {
    _S.STOPPED: frozenset({_S.PLANNED, _S.LOADING, _S.FAILED, _S.STOPPING}),
    _S.PLANNED: frozenset({_S.LOADING, _S.STOPPING, _S.STOPPED, _S.FAILED}),
    _S.LOADING: frozenset({_S.WARMING, _S.SIZING, _S.READY, _S.STOPPING, _S.FAILED}),
    _S.WARMING: frozenset({_S.SIZING, _S.READY, _S.STOPPING, _S.FAILED}),
    _S.SIZING: frozenset({_S.READY, _S.STOPPING, _S.FAILED}),
    _S.READY: frozenset({_S.DRAINING, _S.STOPPING, _S.FAILED}),
    _S.DRAINING: frozenset({_S.STOPPING, _S.READY, _S.FAILED}),
    _S.STOPPING: frozenset({_S.STOPPED, _S.FAILED}),
    _S.FAILED: frozenset({_S.PLANNED, _S.LOADING, _S.STOPPED, _S.STOPPING}),
}


def check_step(old: ModelState, new: ModelState) -> None:
    """Raises StateError unless `old -> new` is in LEGAL."""
    if new not in LEGAL[old]:
        raise StateError(f"A model cannot go from {old} to {new}; legal next states are {', '.join(sorted(LEGAL[old]))}.")


@dataclass(frozen=True, slots=True)
class Desired:
    """The wish for one model. `generation` grows with every change; `by` names who wished: config, admin, request, ttl; retry is an admin
    who was told since that it failed."""

    model: str
    want: Want
    generation: int
    by: str
    since_s: float


@dataclass(frozen=True, slots=True)
class RankHandle:
    """Enough to find one rank again after everything else was restarted.

    pid is the rank's shim, start_ticks its start time in clock ticks since boot (field 22 of /proc/PID/stat), boot_id the
    kernel's: together they name one process for ever. socket_path is set where the rank listens on a Unix socket, else host and port.
    world: how many ranks its model has. attempt: the start that they belong to, which is rank 0's rank_id; empty of a rank alone.
    memory_gib: what was reserved for it on its node; 0 where an earlier release started it.
    """

    rank_id: str
    model: str
    generation: int
    node_id: str
    rank: int
    pid: int
    start_ticks: int
    boot_id: str
    socket_path: str | None
    host: str | None
    port: int | None
    api_key_path: str | None
    config_hash: str
    log_path: str
    started_at_s: float
    world: int = 1
    attempt: str = ""
    memory_gib: int = 0

    @property
    def start(self) -> str:
        """What the ranks of one start alone have in common."""
        return self.attempt or self.rank_id


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank is. Fields are None where neither its log nor its loader has said; eta_s only where measured points give it.

    From units_done on they are the loader's own (workers.loadfile): units are tensors and experts; read_bytes came from the disk, whole
    blocks, past the page cache where direct; source is `checkpoint` or `cache`; cache_state tells of the quantized cache that is written
    beside the load: none, writing, written, failed or skipped, and cache_why of the latter two. failure is why the load ended,
    and failure_lasts that the next one will end the same way. lost: which process inside the engine is gone. kv is how the KV cache was
    sized, as the worker says (workers.kvfile.read_kv), or where vLLM sized it its log; None before.
    """

    phase: str = "starting"
    fraction: float | None = None
    shards_done: int | None = None
    shards_total: int | None = None
    bytes_done: int | None = None
    bytes_total: int | None = None
    eta_s: float | None = None
    weights_gib: float | None = None
    weights_s: float | None = None
    kv_tokens: int | None = None
    kv_gib: float | None = None
    kv_requests: float | None = None
    init_s: float | None = None
    server_up: bool = False
    last_error: str | None = None
    lost: str | None = None
    line_at_s: float | None = None
    units_done: int | None = None
    units_total: int | None = None
    bytes_per_s: float | None = None
    read_bytes: int | None = None
    source: str | None = None
    format: str | None = None
    direct: bool | None = None
    cache_state: str | None = None
    cache_bytes: int | None = None
    cache_why: str | None = None
    failure: str | None = None
    failure_lasts: bool = False
    kv: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RankFact:
    """What an agent observed of one rank: a handle, whether its processes live, and how it ended.

    halted: a signal has stopped a process of it (SIGSTOP): it lives and will never answer. cpu_s: CPU seconds of all its processes.
    killed: the guard's sentence, where it was the guard. host_bytes: anonymous memory; device_bytes: as nvidia-smi says.
    """

    handle: RankHandle
    alive: bool
    processes: int
    exit_code: int | None
    stop_ordered: bool
    progress: Progress
    halted: bool = False
    cpu_s: float = 0.0
    diagnosis: Diagnosis | None = None
    killed: str | None = None
    host_bytes: int | None = None
    device_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at a node's memory, bytes; at_s is the node's wall clock, age_s how old it was when it came in.

    unaccounted: what no line of /proc/meminfo has, so the driver's. slope: of MemAvailable in the last second; floor_in_s: until the
    guard's floor at that pace, None where memory does not go. scanned, swapped: pages per second. level: ok, tight, pressed or
    critical, and why.
    """

    node_id: str
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
    device_trouble: str | None = None
    gpu_power_w: float | None = None
    gpu_busy_percent: float | None = None
    gpu_celsius: float | None = None


N = TypeVar("N")


def known(noun: type[N], raw: Mapping[str, Any]) -> N:
    """A noun of what another release may have written: members that it does not know are left out. TypeError where one is missing."""
    names = {field.name for field in fields(noun)}  # type: ignore[arg-type]
    return noun(**{name: value for name, value in raw.items() if name in names})


class OperationState(StrEnum):
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


@dataclass(frozen=True, slots=True)
class Operation:
    """A long action somebody asked for: what, for which model, how far, and how it ended."""

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


class Store:
    """Desired models, rank handles, operations and events in one SQLite file. One writer: the supervisor's thread.

    The write-ahead log and `synchronous=NORMAL` keep the file whole through `kill -9` (sqlite.org/wal.html). Raises StateError,
    naming the file, where the file cannot be opened, read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._translated():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0.1)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._migrate()

    def close(self) -> None:
        self._db.close()

    def desired(self) -> dict[str, Desired]:
        rows = self._rows("SELECT model, want, generation, by, since_s FROM desired")
        return {row[0]: Desired(row[0], Want(row[1]), row[2], row[3], row[4]) for row in rows}

    def save_desired(self, desired: Desired) -> None:
        self._write("INSERT OR REPLACE INTO desired(model, want, generation, by, since_s) VALUES (?,?,?,?,?)", astuple(desired))

    def forget_desired(self, model: str) -> None:
        self._write("DELETE FROM desired WHERE model=?", (model,))

    def handles(self) -> dict[str, RankHandle]:
        """Those that can be read; one of another release that cannot is left to the adoption scan."""
        found = {}
        for rank_id, raw in self._rows("SELECT rank_id, handle FROM handles"):
            try:
                found[rank_id] = known(RankHandle, json.loads(raw))
            except (TypeError, ValueError):
                continue
        return found

    def save_handle(self, handle: RankHandle) -> None:
        self._write("INSERT OR REPLACE INTO handles(rank_id, handle) VALUES (?,?)", (handle.rank_id, json.dumps(asdict(handle))))

    def forget_handle(self, rank_id: str) -> None:
        self._write("DELETE FROM handles WHERE rank_id=?", (rank_id,))
        self._write("DELETE FROM answered WHERE rank_id=?", (rank_id,))

    def save_answered(self, rank_id: str, at_s: float, load_s: float) -> None:
        """This rank, this very process, has answered a real question: who adopts it need not ask again."""
        self._write("INSERT OR REPLACE INTO answered(rank_id, at_s, load_s) VALUES (?,?,?)", (rank_id, at_s, load_s))

    def answered(self, rank_id: str) -> tuple[float | None, float | None] | None:
        """When it first did, and how long its load took, seconds; each None where an earlier release wrote it. None: it never did."""
        return next(iter(self._rows("SELECT at_s, load_s FROM answered WHERE rank_id=?", (rank_id,))), None)

    def specs(self) -> dict[str, dict[str, Any]]:
        """Models that were added through the admin API rather than the configuration file, as the admin body gave them."""
        return {row[0]: json.loads(row[1]) for row in self._rows("SELECT model, spec FROM specs")}

    def save_spec(self, model: str, spec: Mapping[str, Any]) -> None:
        self._write("INSERT OR REPLACE INTO specs(model, spec) VALUES (?,?)", (model, json.dumps(dict(spec))))

    def forget_spec(self, model: str) -> None:
        self._write("DELETE FROM specs WHERE model=?", (model,))

    def operations(self) -> list[Operation]:
        """Oldest first."""
        return [_operation(json.loads(row[0])) for row in self._rows("SELECT operation FROM operations ORDER BY created_at_s")]

    def save_operation(self, operation: Operation) -> None:
        self._write(
            "INSERT OR REPLACE INTO operations(id, created_at_s, operation) VALUES (?,?,?)",
            (operation.id, operation.created_at_s, json.dumps(asdict(operation))),
        )
        self._write(
            "DELETE FROM operations WHERE id NOT IN (SELECT id FROM operations ORDER BY created_at_s DESC LIMIT ?)", (OPERATIONS_KEPT,)
        )

    def add_event(self, at_s: float, kind: str, model: str | None, message: str, data: Mapping[str, Any]) -> Event:
        with self._translated():
            cursor = self._db.execute(
                "INSERT INTO events(at_s, kind, model, message, data) VALUES (?,?,?,?,?)",
                (at_s, kind, model, message, json.dumps(dict(data))),
            )
            seq = int(cursor.lastrowid or 0)
            if seq % 100 == 0:
                self._db.execute("DELETE FROM events WHERE seq <= ?", (seq - EVENTS_KEPT,))
        return Event(seq, at_s, kind, model, message, dict(data))

    def events(self, after_seq: int = 0, limit: int = 200, *, kind: str = "%") -> list[Event]:
        """Oldest first, at most `limit`, the newest ones when after_seq is 0; of one kind, or of all."""
        order = "" if after_seq else " DESC"
        sql = f"SELECT seq, at_s, kind, model, message, data FROM events WHERE seq > ? AND kind LIKE ? ORDER BY seq{order} LIMIT ?"
        rows = self._rows(sql, (after_seq, kind, limit))
        return [Event(row[0], row[1], row[2], row[3], row[4], json.loads(row[5])) for row in (rows if after_seq else rows[::-1])]

    def _migrate(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise StateError(
                f"{self.path} was written by a newer sparkd (schema {version}, this one knows {SCHEMA_VERSION}): "
                "upgrade sparkd, or start with another --state-dir."
            )
        self._db.executescript(
            """
            BEGIN;
            CREATE TABLE IF NOT EXISTS desired(model TEXT PRIMARY KEY, want TEXT NOT NULL, generation INTEGER NOT NULL,
                                               by TEXT NOT NULL, since_s REAL NOT NULL);
            CREATE TABLE IF NOT EXISTS handles(rank_id TEXT PRIMARY KEY, handle TEXT NOT NULL);
            CREATE TABLE IF NOT EXISTS answered(rank_id TEXT PRIMARY KEY, at_s REAL, load_s REAL);
            CREATE TABLE IF NOT EXISTS specs(model TEXT PRIMARY KEY, spec TEXT NOT NULL);
            CREATE TABLE IF NOT EXISTS operations(id TEXT PRIMARY KEY, created_at_s REAL NOT NULL, operation TEXT NOT NULL);
            CREATE TABLE IF NOT EXISTS events(seq INTEGER PRIMARY KEY AUTOINCREMENT, at_s REAL NOT NULL, kind TEXT NOT NULL,
                                              model TEXT, message TEXT NOT NULL, data TEXT NOT NULL);
            COMMIT;
            """
        )
        if not any(row[1] == "load_s" for row in self._db.execute("PRAGMA table_info(answered)")):
            self._db.executescript("BEGIN; ALTER TABLE answered ADD COLUMN at_s REAL; ALTER TABLE answered ADD COLUMN load_s REAL; COMMIT;")
        self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def _rows(self, sql: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self._translated():
            return self._db.execute(sql, values).fetchall()

    def _write(self, sql: str, values: tuple[Any, ...]) -> None:
        with self._translated():
            self._db.execute(sql, values)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StateError(
                f"The state database {self.path} cannot be used: {error}. Check that the folder exists, is writable by this user and "
                "has free space, or name another with --state-dir."
            ) from error


def _operation(raw: dict[str, Any]) -> Operation:
    progress = raw.pop("progress", None)
    raw["state"] = OperationState(raw["state"])
    return known(Operation, raw | {"progress": known(Progress, progress) if progress else None})
