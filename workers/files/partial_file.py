"""One file while it is fetched: the part on disk, the sums of its verified chunks, and its end."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

from sparkd.errors import RankError
from workers.files.chunks import CHUNK_BYTES, Buffer, chunks_of, digest, range_of, sha256_of
from workers.files.direct_file import DirectFile
from workers.files.manifest import JOURNAL, PART, File, is_there


class PartialFile:
    """Begun anew, or gone on with: chunks that an earlier try has in its journal are read again and counted only if their sum is right.

    to: where the file belongs.
    """

    def __init__(self, file: File, to: Path) -> None:
        self.file, self.to = file, to
        self._path, self._sums = to.with_name(to.name + PART), to.with_name(to.name + JOURNAL)
        self._lock = threading.Lock()
        self._known: dict[int, str] = {}
        self._open: DirectFile | None = None
        self._left = 0
        self.done_bytes = 0

    def begin(self) -> range:
        """The chunks to verify or to fetch; none where the file is there. Raises OSError."""
        if is_there(self.to, self.file):
            self.done_bytes = self.file.size
            return range(0)
        self.to.parent.mkdir(parents=True, exist_ok=True)
        self._known = self._journal() if self._path.exists() else {}
        if not self._known:
            self.forget()
            self._sums.write_text(self._heading(), encoding="ascii")
        self._open = DirectFile(self._path, size_bytes=self.file.size)
        self._left = chunks_of(self.file.size)
        return range(self._left)

    def is_as_before(self, index: int, buffer: Buffer) -> bool:
        """Whether an earlier try's chunk is on the disk as its journal has it."""
        known = self._known.get(index)
        if known is None or self._open is None:
            return False
        return digest(buffer.read(self._open, *range_of(self.file.size, index))) == known

    def keep(self, index: int, buffer: Buffer, checksum: str) -> bool:
        """Write a chunk to the disk. checksum: from the source; False where the bytes do not have that checksum."""
        offset, size = range_of(self.file.size, index)
        if digest(buffer.view[:size]) != checksum:
            return False
        if self._open is None:
            raise RankError(f"{self.to} was closed while it was fetched.")
        self._open.write(offset, buffer.view[:size])
        with self._lock, open(self._sums, "a", encoding="ascii") as journal:
            journal.write(f"{index} {checksum}\n")
        return True

    def done(self, index: int) -> bool:
        """Count a chunk that is there; whether it was the file's last."""
        with self._lock:
            self._left -= 1
            self.done_bytes += range_of(self.file.size, index)[1]
            return not self._left

    def finish(self, buffer: Buffer) -> None:
        """All of it is there: held against the hub's SHA-256 where that is known, and put in its place. Raises RankError, OSError."""
        if self._open is None:
            return
        self._open.settle()
        self.close()
        if self.file.sha256 and sha256_of(self._path, buffer) != self.file.sha256:
            self.forget()
            raise RankError(
                f"{self.file.name} does not have the SHA-256 that the hub names, {self.file.sha256[:12]}...: it is damaged where it came "
                "from. Remove it there from the hub's cache, and pull again."
            )
        os.utime(self._path, ns=(self.file.mtime_ns, self.file.mtime_ns))
        self._path.replace(self.to)
        with suppress(FileNotFoundError):
            self._sums.unlink()

    def forget(self) -> None:
        for path in (self._path, self._sums):
            with suppress(FileNotFoundError):
                path.unlink()

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _heading(self) -> str:
        return f"{self.file.size} {CHUNK_BYTES} {self.file.blob or self.file.mtime_ns}\n"

    def _journal(self) -> dict[int, str]:
        """Chunk -> sum; none where it is of another file, or of another size of chunks. A line that was cut off does not count."""
        try:
            first, *lines = self._sums.read_text("ascii").splitlines(keepends=True)
        except (OSError, ValueError):
            return {}
        if first != self._heading():
            return {}
        words = [line.split() for line in lines if line.endswith("\n")]
        return {int(index): checksum for index, checksum in (pair for pair in words if len(pair) == 2)}
