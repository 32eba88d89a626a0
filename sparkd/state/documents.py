"""Keeps documents in state.db: each kind has a table, and each row an id and JSON."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Generic, TypeVar

from sparkd.errors import StateError
from sparkd.state.store import FILE, connect, state_errors
from workers.host.private_files import in_others_hands

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Documents(Generic[T]):
    """One table.

    Each call opens the database for itself, because verbs and a bench's process read and write it, too. Its methods block, and raise
    StateError where the database cannot be opened, read or written. A row that cannot be read is logged and dropped.
    """

    def __init__(self, state_dir: Path, table: str, make: Callable[[Any], T]) -> None:
        """make: turns a row's JSON into a value, and raises ValueError for another release's that it cannot use."""
        self._path = state_dir / FILE
        self._table = table
        self._make = make

    def all(self) -> dict[str, T]:
        """By id, in the order of the ids; empty where there is no database, or it is another user's."""
        return self._read("SELECT id, document FROM {} ORDER BY id")

    def get(self, key: str) -> T | None:
        return self._read("SELECT id, document FROM {} WHERE id = ?", key).get(key)

    def put(self, key: str, document: Any) -> None:
        self._execute("CREATE TABLE IF NOT EXISTS {}(id TEXT PRIMARY KEY, document TEXT NOT NULL)")
        self._execute("INSERT OR REPLACE INTO {} VALUES (?, ?)", key, json.dumps(document))

    def remove(self, key: str) -> None:
        """Remove a row that is there."""
        self._execute("DELETE FROM {} WHERE id = ?", key)

    def _read(self, sql: str, *values: str) -> dict[str, T]:
        documents: dict[str, T] = {}
        # A read makes no table.
        if not os.access(self._path, os.R_OK) or not self._execute("SELECT name FROM sqlite_master WHERE name = ?", self._table):
            return documents
        for key, text in self._execute(sql, *values):
            try:
                documents[key] = self._make(json.loads(text))
            except (TypeError, ValueError) as error:
                _log.warning("%s, table %s: the row of %s cannot be read and is dropped: %s", self._path, self._table, key, error)
                self.remove(key)
        return documents

    def _execute(self, sql: str, *values: str) -> list[tuple[str, str]]:
        # Hostile side: an engine with a model's own code, which runs as the daemon's user. As root, SQLite would follow its links.
        if path := in_others_hands(self._path.parent):
            raise StateError(f"{path} is in another user's hands, and this is root: run it as the user of that folder (`sudo -u USER ..`).")
        with state_errors(self._path, self._table), closing(connect(self._path, timeout_s=1.0)) as db:
            return db.execute(sql.format(self._table), values).fetchall()
