"""The daemon's state in one SQLite file: what survives a restart, and what of it cannot be read."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from sparkd.config.fields import check_name
from sparkd.errors import StateError
from sparkd.state.nouns import Desired, Event, Operation, RankHandle
from sparkd.state.rows import Damage, noun_of, object_in, text_or_bytes
from workers.host.private_files import private_file

SCHEMA_VERSION = 1
# See Store: the hundreds are what another release may not be able to read.
SCHEMA_MAJOR = 100
EVENTS_KEPT = 5000
# No event is the so many'th. SQLite takes no further row behind one with the largest number, and says that the disk is full.
EVENTS_EVER = 1 << 53
OPERATIONS_KEPT = 500

_log = logging.getLogger(__name__)


class Store:
    """One SQLite file: `wishes`, `ranks` and `history` read and write its tables. One writer: the supervisor's thread.

    The write-ahead log and `synchronous=NORMAL` keep the file whole through `kill -9` (sqlite.org/wal.html). Raises StateError, naming
    the file and the table, where the file cannot be opened, read or written.

    A row that this release cannot use is left out and stands in `damages`; it stays in the file. So is what lies behind a damaged page,
    but for wishes and added models. `user_version` is 100 * major + minor: a release may add tables, columns that have a default and
    members of JSON under a new minor, and every release of the same major starts with it, so that a downgrade does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damages: list[Damage] = []
        # By seq: events are added and removed only, so a row that was examined once stays what it is.
        self._examined: set[int] = set()
        self.wishes, self.ranks, self.history = StoredWishes(self), StoredRanks(self), History(self)
        with self.translated():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.exists() and not path.is_file():
                raise OSError(f"it is {'a folder' if path.is_dir() else 'no file'}")
            # SQLite gives its other files the mode of this one when it makes them.
            private_file(path)
            for beside in (path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
                if beside.exists():
                    private_file(beside)
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0.1)
        try:
            with self.translated():
                self._db.text_factory = text_or_bytes
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=NORMAL")
                self._migrate()
            self._examine()
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    def forget_damage(self, damage: Damage) -> None:
        """Remove a row that was left out, whatever its key is."""
        self.write(damage.table, f"DELETE FROM {damage.table} WHERE rowid=?", (damage.row,))
        self.damages = [other for other in self.damages if other is not damage]

    def read(self, table: str, rest: str = "", values: tuple[Any, ...] = (), damages: list[Damage] | None = None) -> Iterator[Any]:
        """The values of a table's rows. damages: takes the damage of each row that is left out."""
        columns, make = _TABLES[table]
        with self.translated(table):
            try:
                cursor = self._db.execute(f"SELECT rowid, {columns} FROM {table} {rest}", values)
                # All at once: a row that is written between two of them could change what is read.
                for rowid, *row in list(self._fetched(cursor, table, damages)):
                    try:
                        yield self._event(*row) if table == "events" else make(*row)
                    except ValueError as error:
                        if damages is not None:
                            damages.append(Damage(table, rowid, row[0], str(error)))
            except sqlite3.DatabaseError as error:
                self._pass_over(error, table, damages)

    def write(self, table: str, sql: str, values: tuple[Any, ...]) -> None:
        with self.translated(table):
            self._db.execute(sql, values)

    def execute(self, sql: str, values: tuple[Any, ...]) -> sqlite3.Cursor:
        """Inside `translated`."""
        return self._db.execute(sql, values)

    def replaced(self, table: str, key: str) -> None:
        """Forget the damage of a row that was written again or removed."""
        self.damages = [damage for damage in self.damages if (damage.table, damage.key) != (table, key)]

    @contextmanager
    def translated(self, table: str = "") -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, UnicodeError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            place = f"{self.path}, table {table}," if table else f"{self.path}"
            raise StateError(f"The state database {place} cannot be used: {reason}. {_cure(error, self.path)}") from error

    def forget_examined(self, last_seq: int) -> None:
        """Events up to last_seq were removed."""
        self._examined = {seq for seq in self._examined if seq > last_seq}

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
        # Where a page of events is damaged, `_examine` says so.
        with suppress(sqlite3.DatabaseError):
            self._number_events()

    def _number_events(self) -> None:
        """Remove events with numbers that none has, which would leave no number for the next one."""
        removed = self._db.execute("DELETE FROM events WHERE seq > ?", (EVENTS_EVER,)).rowcount
        if removed:
            _log.warning("%s: table events: %d damaged rows with impossible numbers are removed", self.path, removed)
        # SQLite remembers the largest number, of rows that are gone, too.
        last = "SELECT ifnull(max(seq), 0) FROM events"
        self._db.execute(f"UPDATE sqlite_sequence SET seq = ({last}) WHERE name = 'events' AND seq > ?", (EVENTS_EVER,))

    def _examine(self) -> None:
        """Read every row once, so that the rows that are left out are known when the daemon starts, not at a later look."""
        for table in _TABLES:
            for _ in self.read(table, damages=self.damages):
                pass

    def _event(self, seq: int, *columns: Any) -> Event:
        if seq in self._examined:
            at_s, kind, model, message, data = columns
            return Event(seq, at_s, kind, model, message, json.loads(data))
        event = _event(seq, *columns)
        self._examined.add(seq)
        return event

    def _fetched(self, cursor: sqlite3.Cursor, table: str, damages: list[Damage] | None) -> Iterator[tuple[Any, ...]]:
        try:
            yield from cursor
        except sqlite3.DatabaseError as error:
            self._pass_over(error, table, damages)

    def _pass_over(self, error: sqlite3.DatabaseError, table: str, damages: list[Damage] | None) -> None:
        """Damaged pages of what can be observed again or is history are left out; raises the error for all else."""
        if table in _WISHES or _code(error) != sqlite3.SQLITE_CORRUPT:
            raise error
        if damages is not None:
            damages.append(Damage(table, None, None, str(error)))


class StoredWishes:
    """The tables of wishes: models that were loaded or unloaded, and models that were added."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def desired(self) -> dict[str, Desired]:
        return {wish.model: wish for wish in self._store.read("desired")}

    def save_desired(self, desired: Desired) -> None:
        self._store.write(
            "desired", "INSERT OR REPLACE INTO desired(model, want, generation, by, since_s) VALUES (?,?,?,?,?)", astuple(desired)
        )
        self._store.replaced("desired", desired.model)

    def forget_desired(self, model: str) -> None:
        self._store.write("desired", "DELETE FROM desired WHERE model=?", (model,))
        self._store.replaced("desired", model)

    def specs(self) -> dict[str, dict[str, Any]]:
        """Models that were added through the admin API rather than the configuration file, as the admin body gave them."""
        return dict(self._store.read("specs"))

    def save_spec(self, model: str, spec: Mapping[str, Any]) -> None:
        self._store.write("specs", "INSERT OR REPLACE INTO specs(model, spec) VALUES (?,?)", (model, json.dumps(dict(spec))))
        self._store.replaced("specs", model)

    def forget_spec(self, model: str) -> None:
        self._store.write("specs", "DELETE FROM specs WHERE model=?", (model,))
        self._store.replaced("specs", model)


class StoredRanks:
    """The handles of ranks, and which of them have answered."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def handles(self) -> dict[str, RankHandle]:
        """One of another release that cannot be read is left to the adoption scan."""
        return dict(self._store.read("handles"))

    def save_handle(self, handle: RankHandle) -> None:
        sql = "INSERT OR REPLACE INTO handles(rank_id, handle) VALUES (?,?)"
        self._store.write("handles", sql, (handle.rank_id, json.dumps(asdict(handle))))

    def forget_handle(self, rank_id: str) -> None:
        self._store.write("handles", "DELETE FROM handles WHERE rank_id=?", (rank_id,))
        self._store.write("answered", "DELETE FROM answered WHERE rank_id=?", (rank_id,))

    def save_answered(self, rank_id: str, at_s: float, load_s: float) -> None:
        """This rank, this very process, has answered a real question: who adopts it need not ask again."""
        self._store.write("answered", "INSERT OR REPLACE INTO answered(rank_id, at_s, load_s) VALUES (?,?,?)", (rank_id, at_s, load_s))

    def answered(self, rank_id: str) -> tuple[float | None, float | None] | None:
        """When it first did, and how long its load took, seconds; each None where an earlier release wrote it. None: it never did."""
        return next(((row.at_s, row.load_s) for row in self._store.read("answered", "WHERE rank_id=?", (rank_id,))), None)


class History:
    """Operations and events."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def operations(self) -> list[Operation]:
        """Oldest first."""
        return list(self._store.read("operations", "ORDER BY rowid"))

    def save_operation(self, operation: Operation) -> None:
        self._store.write(
            "operations",
            "INSERT INTO operations(id, created_at_s, operation) VALUES (?,?,?) ON CONFLICT(id) DO UPDATE SET operation=excluded.operation",
            (operation.id, operation.created_at_s, json.dumps(asdict(operation))),
        )
        # In the order in which they began: a clock that was set back must not make the newest the first to go.
        newest = "SELECT rowid FROM operations ORDER BY rowid DESC LIMIT ?"
        self._store.write("operations", f"DELETE FROM operations WHERE rowid NOT IN ({newest})", (OPERATIONS_KEPT,))

    def add_event(self, at_s: float, kind: str, model: str | None, message: str, data: Mapping[str, Any]) -> Event:
        # The name of a file may hold bytes that are no text (os.fsdecode), and SQLite takes text only.
        message = message.encode("utf-8", "backslashreplace").decode()
        with self._store.translated("events"):
            cursor = self._store.execute(
                "INSERT INTO events(at_s, kind, model, message, data) VALUES (?,?,?,?,?)",
                (at_s, kind, model, message, json.dumps(dict(data))),
            )
            seq = int(cursor.lastrowid or 0)
            if seq % 100 == 0:
                self._store.execute("DELETE FROM events WHERE seq <= ?", (seq - EVENTS_KEPT,))
                self._store.forget_examined(seq - EVENTS_KEPT)
        return Event(seq, at_s, kind, model, message, dict(data))

    def events(self, after_seq: int = 0, limit: int = 200, *, kind: str = "%") -> list[Event]:
        """Oldest first, at most `limit`, the newest ones when after_seq is 0; of one kind, or of all."""
        order = "" if after_seq else " DESC"
        events = list(self._store.read("events", f"WHERE seq > ? AND kind LIKE ? ORDER BY seq{order} LIMIT ?", (after_seq, kind, limit)))
        return events if after_seq else events[::-1]

    def events_behind(self, seq: int, limit: int) -> tuple[list[Event], int]:
        """The next `limit` rows behind `seq`, oldest first, without those that are left out; and the seq of the last row, or `seq`."""
        left_out: list[Damage] = []
        events = list(self._store.read("events", "WHERE seq > ? ORDER BY seq LIMIT ?", (seq, limit), left_out))
        rows = [event.seq for event in events] + [damage.row for damage in left_out if damage.row is not None]
        return events, max(rows, default=seq)

    def behind_newest(self, count: int) -> int:
        """The seq behind which the newest `count` events lie; 0 where there are no more than these."""
        with self._store.translated("events"):
            row = self._store.execute("SELECT seq FROM events WHERE seq > 0 ORDER BY seq DESC LIMIT 1 OFFSET ?", (count,)).fetchone()
        return int(row[0]) if row else 0


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


@dataclass(frozen=True, slots=True)
class _Answered:
    """A row of that table."""

    rank_id: str
    at_s: float | None
    load_s: float | None


def _desired(model: Any, want: Any, generation: Any, by: Any, since_s: Any) -> Desired:
    return noun_of(Desired, {"model": model, "want": want, "generation": generation, "by": by, "since_s": since_s})


def _handle(rank_id: Any, handle: Any) -> tuple[str, RankHandle]:
    read = noun_of(RankHandle, object_in(handle))
    if read.rank_id != rank_id:
        raise ValueError("it is the handle of another rank")
    return rank_id, read


def _answered(rank_id: Any, at_s: Any, load_s: Any) -> _Answered:
    return noun_of(_Answered, {"rank_id": rank_id, "at_s": at_s, "load_s": load_s})


def _spec(model: Any, spec: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(model, str):
        raise ValueError("its name is not text")
    check_name(model)
    return model, object_in(spec)


def _operation(operation_id: Any, operation: Any) -> Operation:
    read = noun_of(Operation, object_in(operation))
    if read.id != operation_id:
        raise ValueError("it is another operation")
    return read


def _event(seq: Any, at_s: Any, kind: Any, model: Any, message: Any, data: Any) -> Event:
    members = {"seq": seq, "at_s": at_s, "kind": kind, "model": model, "message": message, "data": object_in(data)}
    return noun_of(Event, members)


# By table: its columns, the key first, and what a row of them is. Each raises ValueError for a row that cannot be used.
_TABLES: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "desired": ("model, want, generation, by, since_s", _desired),
    "handles": ("rank_id, handle", _handle),
    "answered": ("rank_id, at_s, load_s", _answered),
    "specs": ("model, spec", _spec),
    "operations": ("id, operation", _operation),
    "events": ("seq, at_s, kind, model, message, data", _event),
}
# Tables of wishes: no observation can restore their rows.
_WISHES = frozenset({"desired", "specs"})
