"""The daemon's state in one SQLite file: what survives a restart."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from sparkd.errors import StateError
from sparkd.state.nouns import Desired, Event, Operation, RankHandle
from sparkd.state.rows import noun_of
from workers.host.private_files import private_file

FILE = "state.db"
SCHEMA_VERSION = 1
# See Store: the hundreds are what another release may not be able to read.
SCHEMA_MAJOR = 100
EVENTS_KEPT = 5000
OPERATIONS_KEPT = 500

_log = logging.getLogger(__name__)


@contextmanager
def state_errors(path: Path, table: str = "") -> Iterator[None]:
    """Raise a StateError that names the file and the table where SQLite or the disk refuses."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        place = f"{path}, table {table}," if table else f"{path}"
        raise StateError(f"The state database {place} cannot be used: {reason}. {_cure(error, path)}") from error


def connect(path: Path, *, timeout_s: float) -> sqlite3.Connection:
    """Open the database, which is made for this user alone where it is missing.

    timeout_s: how long a write waits for another connection's.

    Raises sqlite3.Error, OSError.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # SQLite gives its other files the mode of this one when it makes them.
    private_file(path)
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=timeout_s)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
    except BaseException:
        db.close()
        raise
    return db


class Store:
    """One SQLite file: `wishes`, `ranks` and `history` read and write its tables. One writer: the supervisor's thread.

    The write-ahead log and `synchronous=NORMAL` keep the file whole through `kill -9` (sqlite.org/wal.html). Raises StateError, naming
    the file and the table, where the file cannot be opened, read or written.

    A row that this release cannot read is logged and dropped when it opens the file. `user_version` is 100 * major + minor: a release may
    add tables, columns that have a default and members of JSON under a new minor, and every release of the same major starts with it, so
    that a downgrade does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.wishes, self.ranks, self.history = StoredWishes(self), StoredRanks(self), History(self)
        with state_errors(path):
            for beside in (path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
                if beside.exists():
                    private_file(beside)
            self._db = connect(path, timeout_s=0.1)
        try:
            with state_errors(path):
                self._migrate()
                self._drop_unreadable()
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    def read(self, table: str, rest: str = "", values: tuple[Any, ...] = ()) -> list[Any]:
        """The values of a table's rows."""
        columns, make = _TABLES[table]
        return [make(*row) for row in self.execute(table, f"SELECT {columns} FROM {table} {rest}", values)]

    def execute(self, table: str, sql: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """The rows that SQLite answers."""
        with state_errors(self.path, table):
            return self._db.execute(sql, values).fetchall()

    def _migrate(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version // SCHEMA_MAJOR != SCHEMA_VERSION // SCHEMA_MAJOR:
            raise StateError(
                f"{self.path} was written by a newer sparkd (schema {version}, this one knows those below "
                f"{(SCHEMA_VERSION // SCHEMA_MAJOR + 1) * SCHEMA_MAJOR}): upgrade sparkd, or start with another --state-dir."
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
        if version < SCHEMA_VERSION:
            self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def _drop_unreadable(self) -> None:
        for table, (columns, make) in _TABLES.items():
            for rowid, *row in self._db.execute(f"SELECT rowid, {columns} FROM {table}").fetchall():
                try:
                    make(*row)
                except ValueError as error:
                    _log.warning("%s, table %s: the row of %s cannot be read and is dropped: %s", self.path, table, row[0], error)
                    self._db.execute(f"DELETE FROM {table} WHERE rowid=?", (rowid,))


class StoredWishes:
    """The tables of wishes: models that were loaded or unloaded, and models that were added."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def desired(self) -> dict[str, Desired]:
        return {wish.model: wish for wish in self._store.read("desired")}

    def save_desired(self, desired: Desired) -> None:
        self._store.execute(
            "desired", "INSERT OR REPLACE INTO desired(model, want, generation, by, since_s) VALUES (?,?,?,?,?)", astuple(desired)
        )

    def forget_desired(self, model: str) -> None:
        self._store.execute("desired", "DELETE FROM desired WHERE model=?", (model,))

    def specs(self) -> dict[str, dict[str, Any]]:
        """Models that were added through the admin API rather than the configuration file, as the admin body gave them."""
        return dict(self._store.read("specs"))

    def save_spec(self, model: str, spec: Mapping[str, Any]) -> None:
        self._store.execute("specs", "INSERT OR REPLACE INTO specs(model, spec) VALUES (?,?)", (model, json.dumps(dict(spec))))

    def forget_spec(self, model: str) -> None:
        self._store.execute("specs", "DELETE FROM specs WHERE model=?", (model,))


class StoredRanks:
    """The handles of ranks, and which of them have answered."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def handles(self) -> dict[str, RankHandle]:
        return dict(self._store.read("handles"))

    def save_handle(self, handle: RankHandle) -> None:
        sql = "INSERT OR REPLACE INTO handles(rank_id, handle) VALUES (?,?)"
        self._store.execute("handles", sql, (handle.rank_id, json.dumps(asdict(handle))))

    def forget_handle(self, rank_id: str) -> None:
        self._store.execute("handles", "DELETE FROM handles WHERE rank_id=?", (rank_id,))
        self._store.execute("answered", "DELETE FROM answered WHERE rank_id=?", (rank_id,))

    def save_answered(self, rank_id: str, at_s: float, load_s: float) -> None:
        """This rank, this very process, has answered a real question: who adopts it need not ask again."""
        self._store.execute("answered", "INSERT OR REPLACE INTO answered(rank_id, at_s, load_s) VALUES (?,?,?)", (rank_id, at_s, load_s))

    def answered(self, rank_id: str) -> tuple[float | None, float | None] | None:
        """When it first did, and how long its load took, seconds; each None where an earlier release wrote it. None: it never did."""
        return next(iter(self._store.read("answered", "WHERE rank_id=?", (rank_id,))), None)


class History:
    """Operations and events."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def operations(self) -> list[Operation]:
        """Oldest first."""
        return self._store.read("operations", "ORDER BY rowid")

    def save_operation(self, operation: Operation) -> None:
        self._store.execute(
            "operations",
            "INSERT INTO operations(id, created_at_s, operation) VALUES (?,?,?) ON CONFLICT(id) DO UPDATE SET operation=excluded.operation",
            (operation.id, operation.created_at_s, json.dumps(asdict(operation))),
        )
        # In the order in which they began: a clock that was set back must not make the newest the first to go.
        newest = "SELECT rowid FROM operations ORDER BY rowid DESC LIMIT ?"
        self._store.execute("operations", f"DELETE FROM operations WHERE rowid NOT IN ({newest})", (OPERATIONS_KEPT,))

    def add_event(self, at_s: float, kind: str, model: str | None, message: str, data: Mapping[str, Any]) -> Event:
        # The name of a file may hold bytes that are no text (os.fsdecode), and SQLite takes text only.
        message = message.encode("utf-8", "backslashreplace").decode()
        columns = (at_s, kind, model, message, json.dumps(dict(data)))
        ((seq,),) = self._store.execute(
            "events", "INSERT INTO events(at_s, kind, model, message, data) VALUES (?,?,?,?,?) RETURNING seq", columns
        )
        if seq % 100 == 0:
            self._store.execute("events", "DELETE FROM events WHERE seq <= ?", (seq - EVENTS_KEPT,))
        return Event(seq, at_s, kind, model, message, dict(data))

    def events(self, after_seq: int = 0, limit: int = 200) -> list[Event]:
        """Oldest first, at most `limit`, the newest ones when after_seq is 0."""
        order = "" if after_seq else " DESC"
        events = self._store.read("events", f"WHERE seq > ? ORDER BY seq{order} LIMIT ?", (after_seq, limit))
        return events if after_seq else events[::-1]

    def events_behind(self, seq: int, limit: int) -> tuple[list[Event], int]:
        """The next `limit` events behind `seq`, oldest first, and the seq of the last one, or `seq`."""
        events = self._store.read("events", "WHERE seq > ? ORDER BY seq LIMIT ?", (seq, limit))
        return events, events[-1].seq if events else seq

    def behind_newest(self, count: int) -> int:
        """The seq behind which the newest `count` events lie; 0 where there are no more than these."""
        rows = self._store.execute("events", "SELECT seq FROM events WHERE seq > 0 ORDER BY seq DESC LIMIT 1 OFFSET ?", (count,))
        return int(rows[0][0]) if rows else 0


def _code(error: Exception) -> int:
    """SQLite's primary result code (sqlite.org/rescode.html); 0 for what is no error of SQLite's."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _cure(error: Exception, path: Path) -> str:
    if _code(error) == sqlite3.SQLITE_FULL:
        return "Free some space on its disk, or name another folder with --state-dir."
    if _code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return (
            f"Move it away (mv {path} {path}.damaged) and start again: engines that run are adopted, sparkd.yaml decides what loads, "
            "and models added later must be added again."
        )
    return "Check that the folder exists, is writable by this user and has free space, or name another with --state-dir."


def _desired(model: str, want: str, generation: int, by: str, since_s: float) -> Desired:
    return noun_of(Desired, {"model": model, "want": want, "generation": generation, "by": by, "since_s": since_s})


def _event(seq: int, at_s: float, kind: str, model: str | None, message: str, data: str) -> Event:
    return noun_of(Event, {"seq": seq, "at_s": at_s, "kind": kind, "model": model, "message": message, "data": json.loads(data)})


# By table: its columns, the key first, and what a row of them is. Each raises ValueError for a row that cannot be read.
_TABLES: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "desired": ("model, want, generation, by, since_s", _desired),
    "handles": ("rank_id, handle", lambda rank_id, handle: (rank_id, noun_of(RankHandle, json.loads(handle)))),
    "answered": ("rank_id, at_s, load_s", lambda _, at_s, load_s: (at_s, load_s)),
    "specs": ("model, spec", lambda model, spec: (model, dict(json.loads(spec)))),
    "operations": ("id, operation", lambda _, operation: noun_of(Operation, json.loads(operation))),
    "events": ("seq, at_s, kind, model, message, data", _event),
}
