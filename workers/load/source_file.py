"""Owns one file of a checkpoint while it is read. Tells what keeps it from being read as an error of the checkpoint."""

from __future__ import annotations

import errno
import os
import stat
import threading
import traceback

from sparkd.errors import CheckpointError
from workers.files.direct_file import DirectFile

_AGAIN = "Download it again"


class SourceFile:
    """Safe for several threads.

    direct: None reads through the page cache where the file system does not take O_DIRECT, True raises there, False always does so.
    Raises CheckpointError when the file is not there or is none.
    """

    def __init__(self, path: str, *, direct: bool | None) -> None:
        self.path = path
        try:
            facts = os.stat(path)
        except OSError as error:
            raise _unreadable(path, "the file cannot be read", error) from error
        if not stat.S_ISREG(facts.st_mode):
            raise CheckpointError("this is not a regular file", file=path, cure="Name a checkpoint whose shards are files")
        self.size_bytes = facts.st_size
        self._file = DirectFile(path, direct=direct is not False)
        self._must_be_direct = direct is True
        self._lock = threading.Lock()
        self._reads_left = 0

    @property
    def fallback_reason(self) -> str | None:
        reason = self._file.fallback_reason
        return reason and f"{self.path} is read through the page cache, which is dropped behind every block: {reason}."

    def expect(self, reads: int) -> None:
        """Announce reads; the file is closed after the last of them."""
        self._reads_left += reads

    def read(self, buffer: memoryview, offset: int, wanted: int) -> int:
        """Fill `buffer` with the file's bytes from `offset` on, at least `wanted`; returns the number read. Raises CheckpointError."""
        try:
            count = self._file.read(buffer, offset, wanted)
        except OSError as error:
            traceback.clear_frames(error.__traceback__)  # they hold views of `buffer`
            raise _unreadable(self.path, f"{len(buffer)} bytes at {offset} cannot be read", error) from error
        if self._must_be_direct and self._file.fallback_reason:
            problem = f"O_DIRECT is required, but {self._file.fallback_reason}"
            raise CheckpointError(problem, file=self.path, cure="Put the checkpoint on a local ext4 or xfs, or allow buffered reads")
        if count < wanted:
            problem = f"the file ends at byte {offset + count}, before byte {offset + wanted}"
            raise CheckpointError(problem, file=self.path, cure=_AGAIN)
        return count

    def finished(self) -> None:
        """Note the end of one of the expected reads."""
        with self._lock:
            self._reads_left -= 1
        if self._reads_left == 0:
            self.close()

    def close(self) -> None:
        """Close the file. No thread may be reading. A second call has no effect."""
        self._file.close()


def _unreadable(path: str, what: str, error: OSError) -> CheckpointError:
    if error.errno == errno.ENOENT:
        return CheckpointError("the file is missing", file=path, cure=_AGAIN)
    if error.errno == errno.EACCES:
        return CheckpointError(f"{what}: permission denied", file=path, cure="Make it readable for the user that sparkd runs as")
    cure = "Look for disk errors in the kernel's log, then download the file again" if error.errno == errno.EIO else None
    return CheckpointError(f"{what}: {error.strerror or error}", file=path, cure=cure)
