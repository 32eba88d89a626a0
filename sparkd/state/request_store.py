"""The finished requests in state.db: figures of the last 10,000, never a prompt, an answer or a key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sparkd.state.store import connect, state_errors

REQUESTS_KEPT = 10_000
# Rows of one write: so many hold the supervisor's own write up for some milliseconds, and it waits 100.
ROWS_AT_ONCE = 200
_MOST_NUMBER = (1 << 63) - 1  # SQLite's integers


class RequestRow(NamedTuple):
    """One request. None: not known, or not yet.

    number: counts the finished ones; None in flight.
    model: a configured name, "unknown" or "".
    key: the name of the client's key.
    started_s: of the wall clock. The other times are seconds from the arrival.
    code: of the error that ended it.
    ttft_s: to the first byte of a stream.
    phase: queued, forwarded, streaming or done.
    pieces: of a stream in flight, those that the client got so far. An engine sends one for each token, or for the few that it had at once.
    """

    number: int | None
    request_id: str
    model: str
    route: str
    key: str | None
    started_s: float
    status: int | None
    code: str | None
    seconds: float
    queued_s: float | None
    ttft_s: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    bytes_out: int
    streamed: bool
    phase: str = "done"
    pieces: int | None = None

    @property
    def failed(self) -> bool:
        return self.code is not None or (self.status or 0) >= 400

    @property
    def tokens_per_s(self) -> float | None:
        """A stream's rate counts from its first token, that of any other answer from when an engine took it."""
        if not self.completion_tokens:
            return None
        if self.streamed:
            tokens, begun_s = self.completion_tokens - 1, self.ttft_s
        else:
            tokens, begun_s = self.completion_tokens, self.queued_s
        return tokens / (self.seconds - begun_s) if tokens and begun_s is not None and self.seconds > begun_s else None

    def body(self) -> dict[str, Any]:
        """The request as the admin API gives it."""
        return {**self._asdict(), "tokens_per_s": self.tokens_per_s, "failed": self.failed}


_COLUMNS = RequestRow._fields[:-2]


_TABLE = """
    CREATE TABLE IF NOT EXISTS requests(
        number INTEGER PRIMARY KEY, request_id TEXT NOT NULL, model TEXT NOT NULL, route TEXT NOT NULL, key TEXT, started_s REAL NOT NULL,
        status INTEGER, code TEXT, seconds REAL NOT NULL, queued_s REAL, ttft_s REAL, prompt_tokens INTEGER, cached_tokens INTEGER,
        completion_tokens INTEGER, bytes_out INTEGER NOT NULL, streamed INTEGER NOT NULL
    ) STRICT
"""


class RequestStore:
    """The table `requests` of state.db, by a connection of its own: a thread writes it beside the supervisor. For one thread at a time.

    Raises StateError where the table cannot be opened, read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with state_errors(self.path, "requests"):
            self._db = connect(path, timeout_s=1.0)
            self._db.execute("PRAGMA cache_size=-256")
            self._db.execute(_TABLE)

    def close(self) -> None:
        self._db.close()

    def last_number(self) -> int:
        with state_errors(self.path, "requests"):
            return int(self._db.execute("SELECT ifnull(max(number), 0) FROM requests").fetchone()[0])

    def write(self, rows: Sequence[RequestRow]) -> None:
        """Add at most ROWS_AT_ONCE requests, and remove those that are more than REQUESTS_KEPT behind the last one."""
        places = ", ".join("?" * len(_COLUMNS))
        values = [row[: len(_COLUMNS)] for row in rows]
        with state_errors(self.path, "requests"), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(f"INSERT OR REPLACE INTO requests({', '.join(_COLUMNS)}) VALUES ({places})", values)
            self._db.execute("DELETE FROM requests WHERE number <= (SELECT max(number) FROM requests) - ?", (REQUESTS_KEPT,))

    def read(
        self, before: int | None = None, limit: int = REQUESTS_KEPT, model: str | None = None, failed: bool | None = None
    ) -> list[RequestRow]:
        """The newest requests first: those with a number below `before`, of one model or of all, with an error, without, or
        with any end."""
        query = f"SELECT {', '.join(_COLUMNS)} FROM requests WHERE number < ?"
        values: list[int | str] = [_MOST_NUMBER if before is None else before]
        if model is not None:
            query += " AND model = ?"
            values.append(model)
        if failed is not None:
            query += f" AND {'' if failed else 'NOT '}(code IS NOT NULL OR ifnull(status, 0) >= 400)"
        with state_errors(self.path, "requests"):
            rows = self._db.execute(f"{query} ORDER BY number DESC LIMIT ?", [*values, limit]).fetchall()
        return [RequestRow._make((*row[:-1], bool(row[-1]), "done", None)) for row in rows]
