"""Sets up the daemon's log: where it goes, and how a line looks (time, level, logger, message)."""

from __future__ import annotations

import copy
import logging
import os
import re
import sys
from contextlib import suppress
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from sparkd.errors import StateError
from workers.rank.log import Redactor

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
FILE_NAME = "sparkd.log"
FILE_BYTES = 8 << 20
FILE_BACKUPS = 3
FILE_MODE = 0o640
# Libraries whose INFO repeats our own words or shows addresses and queries.
QUIET = ("asyncio", "httpcore", "httpx", "ray", "urllib3", "uvicorn")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def set_up(level: str, state_dir: Path | None) -> Path | None:
    """One line per event to stderr; with a state_dir to its sparkd.log, and only warnings to stderr. Returns the log file.

    level: debug, info, warning or error.

    The file also gets what native code (Ray's) writes to descriptor 2. Raises StateError where the file cannot be written.
    """
    root = logging.getLogger()
    root.setLevel(level.upper())
    for handler in list(root.handlers):
        root.removeHandler(handler)
    terminal = _ToStderr()
    terminal.setFormatter(_OneLine("%(levelname)s %(message)s", traces=False) if state_dir else _OneLine(FORMAT))
    root.addHandler(terminal)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    if state_dir is None:
        return None
    terminal.setLevel(logging.WARNING)
    path = state_dir / FILE_NAME
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = _PrivateFile(path, maxBytes=FILE_BYTES, backupCount=FILE_BACKUPS, encoding="utf-8")
    except OSError as error:
        raise StateError(f"The log {path} cannot be written: {error.strerror}. Give a folder of this user by --state-dir.") from None
    file.setFormatter(_OneLine(FORMAT))
    root.addHandler(file)
    sys.stderr.flush()
    sys.stderr = open(os.dup(2), "w", encoding=sys.stderr.encoding, errors="replace", buffering=1)  # noqa: SIM115 - until the end
    with open(path, "ab") as same:
        os.dup2(same.fileno(), 2)
    return path


class _OneLine(logging.Formatter):
    """A traceback or a stranger's newline never begins a line of its own; what looks like a key is taken out."""

    _redactor = Redactor()

    def __init__(self, form: str, *, traces: bool = True) -> None:
        super().__init__(form)
        self._traces = traces

    def format(self, record: logging.LogRecord) -> str:
        if not self._traces:
            record = copy.copy(record)
            record.exc_info = record.exc_text = None
        text = self._redactor.clean(super().format(record))
        return _CONTROL.sub("?", text.replace("\n", "\\n"))


class _ToStderr(logging.Handler):
    """To what sys.stderr is at that moment: while rich shows a live line, it stands in there and puts text above the line."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # stderr is closed: the fault can be written nowhere
            return


class _PrivateFile(RotatingFileHandler):
    """Readable by user and group only. While it cannot be written, one line on the terminal says so, and no traceback for each record."""

    _failing = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failing:
            self._failing = True
            with suppress(OSError, ValueError):
                sys.stderr.write(f"WARNING the log {self.baseFilename} cannot be written: {sys.exc_info()[1]}\n")
                sys.stderr.flush()

    def _open(self) -> TextIOWrapper:
        def private(path: str, flags: int) -> int:
            return os.open(path, flags, FILE_MODE)

        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=private)  # type: ignore[return-value]
