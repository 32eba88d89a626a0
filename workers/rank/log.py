"""A rank's log: bounded lines, no keys, rotated by size, read on from where a reader left off. Never raises on a full disk, never waits
for one that hangs.

Nothing here understands what the lines say; workers.rank.log_parser does.
"""

from __future__ import annotations

import os
import queue
import re
import stat
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from typing import Any

LINE_BYTES = 16 * 1024
MODE = 0o640
SHORTEST_SECRET = 8
# A write has the lines of one read of the engine's output, at most 64 KiB.
WAITING_WRITES = 256
# The line that the shim writes when it starts an engine: one file holds the lines of several starts.
STARTED = "engine started as process"
# vllm/entrypoints/utils.py, log_non_default_args.
NON_DEFAULT = "non-default args: "

_KEYS = re.compile(
    r"(?i)(authorization\W{1,4}(?:(?:bearer|basic)\s+)?|\bbearer\s+|(?:api|access|secret)[_-]?key\W{1,6}|\b(?:hf|auth|access)[_-]?token\W{1,6}|password\W{1,6})"
    r"[^\s'\",}\])]+"
)
_TOKENS = re.compile(r"\b(?:hf_[A-Za-z0-9]{24,}|gh[po]_[A-Za-z0-9]{24,}|(?:sk|glpat|nvapi)-[A-Za-z0-9_-]{16,})")
_HINTS = ("auth", "bearer", "key", "token", "password", "hf_", "sk-", "gh", "glpat", "nvapi")


class Redactor:
    """Replaces the given secrets, and what looks like a key or an Authorization header, by `[redacted]`."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets = sorted({secret for secret in secrets if len(secret) >= SHORTEST_SECRET}, key=len, reverse=True)

    def clean(self, line: str) -> str:
        for secret in self._secrets:
            line = line.replace(secret, "[redacted]")
        lowered = line.lower()
        if not any(hint in lowered for hint in _HINTS):
            return line
        return _TOKENS.sub("[redacted]", _KEYS.sub(r"\1[redacted]", line))


class LineSplitter:
    """Bytes in, text lines out. A line ends at \\n, \\r or both; what passes LINE_BYTES is cut and the rest of it dropped."""

    def __init__(self) -> None:
        self._tail = b""
        self._skipping = False

    @property
    def tail(self) -> str:
        """The beginning of a line whose end has not come: a progress bar writes its carriage return first."""
        return "" if self._skipping else self._tail.decode("utf-8", "replace")

    def feed(self, data: bytes) -> list[str]:
        pieces = (self._tail + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._tail = pieces.pop()
        lines = []
        for piece in pieces:
            if not self._skipping:
                lines.append(_cut(piece))
            self._skipping = False
        if len(self._tail) > LINE_BYTES:
            if not self._skipping:
                lines.append(_cut(self._tail))
            self._tail, self._skipping = b"", True
        return lines

    def finish(self) -> list[str]:
        rest, self._tail = self.tail, b""
        return [rest] if rest else []


class RotatingLog:
    """path, path.1 ... path.N: the newest first, at most max_bytes each, or one write.

    The file is open during a write only: whoever removes or moves it (logrotate) gets a new one with the next lines.
    """

    def __init__(self, path: str, *, max_bytes: int, backups: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._backups = backups

    def write(self, lines: list[str]) -> None:
        """Append the lines, after a rotation where the file would become too large. The engine goes on if they cannot be written."""
        data = "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")
        with suppress(OSError):  # full, read-only or missing
            self._rotate(len(data))
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, MODE)
            with open(fd, "ab", buffering=0) as file:
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    os.fchmod(fd, MODE)
                file.write(data)

    def _rotate(self, more_bytes: int) -> None:
        try:
            size = os.lstat(self.path).st_size
        except FileNotFoundError:
            return
        if not size or size + more_bytes <= self._max_bytes:
            return
        names = [self.path, *(f"{self.path}.{number}" for number in range(1, self._backups + 1))]
        for name, next_name in reversed(list(pairwise(names))):
            with suppress(FileNotFoundError):
                os.replace(name, next_name)
        if not self._backups:
            os.unlink(self.path)


class BackgroundLog:
    """A RotatingLog that a thread of its own writes, from the first `write` on. Lines that find WAITING_WRITES before them are dropped."""

    def __init__(self, log: RotatingLog) -> None:
        self._log = log
        self._waiting: queue.Queue[list[str] | None] = queue.Queue(WAITING_WRITES)
        self._thread = threading.Thread(target=self._work, name="log", daemon=True)

    def write(self, lines: list[str]) -> None:
        if self._thread.ident is None:
            self._thread.start()
        with suppress(queue.Full):
            self._waiting.put_nowait(lines)

    def close(self, timeout_s: float) -> None:
        """Write what waits, and wait for that at most so long."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)

    def _work(self) -> None:
        while (lines := self._waiting.get()) is not None:
            self._log.write(lines)


def read_log(path: str, cursor: str | None = None, *, max_bytes: int = 65536, tail_lines: int = 200) -> dict[str, Any]:
    """{"text": whole lines, "cursor": where to go on}. Without a cursor the last tail_lines; with one, what came since.

    A cursor names a file by its inode, so that lines written just before a rotation are still found in path.1. A log that does not
    exist yet reads as empty.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return {"text": "", "cursor": cursor or "0:0"}
    with os.fdopen(fd, "rb") as log:
        inode, size = os.fstat(fd).st_ino, os.fstat(fd).st_size
        if cursor is None:
            start = max(0, size - max_bytes)
            log.seek(start)
            data = log.read(max_bytes)
            whole = data[: data.rfind(b"\n") + 1]
            lines = whole.splitlines(keepends=True)
            lines = lines[1:] if start else lines
            if start and not lines:
                # Not one line is so short: its end is more than nothing.
                return {"text": _text(data), "cursor": f"{inode}:{start + len(data)}"}
            return {"text": _text(b"".join(lines[-tail_lines:])), "cursor": f"{inode}:{start + len(whole)}"}
        old_inode, offset = _position(cursor)
        if old_inode != inode:
            rest = _rest_of_rotated(path, old_inode, offset, max_bytes)
            if rest is not None:
                return rest
            offset = 0
        if offset > size:  # truncated by another program
            offset = 0
        log.seek(offset)
        data = log.read(max_bytes)
        whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == max_bytes else b"")
        return {"text": _text(whole), "cursor": f"{inode}:{offset + len(whole)}"}


def lines_since(path: str, mark: str, words: Iterable[str], *, most: int = 20_000, with_mark: bool = False) -> list[str]:
    """The last `most` lines with one of `words` after the last line with `mark`, in what was written last and what was rotated last.
    with_mark: and that line before them.

    All of them where no line has the mark: it was rotated away. Reads both files: not for every look.
    """
    marked, wanted = mark.encode(), [word.encode() for word in words]
    matches: deque[bytes] = deque(maxlen=most)
    for name in (f"{path}.1", path):
        try:
            with open(name, "rb") as log:
                for line in log:
                    if marked in line:
                        matches.clear()
                        matches.extend([line] if with_mark else [])
                    elif any(word in line for word in wanted):
                        matches.append(line)
        except FileNotFoundError:
            continue
    return [line.decode("utf-8", "replace").rstrip("\n") for line in matches]


def _rest_of_rotated(path: str, inode: int, offset: int, max_bytes: int) -> dict[str, Any] | None:
    """The rest of the file that the cursor was in; None once that was read, or is gone."""
    try:
        with open(f"{path}.1", "rb") as log:
            if os.fstat(log.fileno()).st_ino != inode:
                return None
            log.seek(offset)
            data = log.read(max_bytes)
    except FileNotFoundError:
        return None
    return {"text": _text(data), "cursor": f"{inode}:{offset + len(data)}"} if data else None


def _position(cursor: str) -> tuple[int, int]:
    """(0, 0) for what is no cursor of ours: a client may send anything, and seek takes 63 bits."""
    match = re.fullmatch(r"([0-9]{1,20}):([0-9]{1,18})", cursor)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _cut(line: bytes) -> str:
    text = line[:LINE_BYTES].decode("utf-8", "replace")
    return f"{text} [cut]" if len(line) > LINE_BYTES else text


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
