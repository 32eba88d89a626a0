"""Writes stdout and stderr for the daemon, on threads: a reader that is slow or has stopped does not hold up its loop."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

# Texts that wait for a reader; those behind them are left out.
WAITING = 1000
LAST_WORDS_S = 1.0


class Output:
    """A text stream that hands each text to a thread, which writes it to the descriptor of `stream`.

    A terminal that is stopped (Ctrl-S, a stopped screen), a pipe without a reader and a journal that hangs block that thread only. The
    thread drops a text that it cannot write, because the terminal is gone.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._texts: queue.Queue[str | None] = queue.Queue(WAITING)
        self._left_out = 0
        self._thread = threading.Thread(target=self._write_forever, name="output", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        try:
            self._texts.put_nowait(text)
        except queue.Full:
            self._left_out += 1
        return len(text)

    def flush(self) -> None:
        """Do nothing: the thread writes at once, and a writer must not wait for it."""

    def finish(self, timeout_s: float) -> None:
        """Give the thread so long for what it has not written yet."""
        with suppress(queue.Full):
            self._texts.put_nowait(None)
            self._thread.join(timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _write_forever(self) -> None:
        while (text := self._texts.get()) is not None:
            left_out, self._left_out = self._left_out, 0
            if left_out:
                text += f"({left_out} lines were left out, because nobody read this output.)\n"
            with suppress(OSError, ValueError):  # the terminal is gone, or the stream was closed
                rest = text.encode(self._stream.encoding, "replace")
                while rest:
                    rest = rest[os.write(self._stream.fileno(), rest) :]


@contextmanager
def unblocked() -> Iterator[None]:
    """sys.stdout and sys.stderr never block inside; what was written last still comes, if anybody reads it."""
    before = sys.stdout, sys.stderr
    streams = Output(sys.stdout), Output(sys.stderr)
    sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in streams:
            stream.finish(LAST_WORDS_S)
