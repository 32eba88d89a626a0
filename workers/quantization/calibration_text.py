"""Reads the text over which a model is measured."""

from __future__ import annotations

from pathlib import Path

from sparkd.errors import CheckpointError

# The text that comes with sparkd.
OWN = Path(__file__).parents[1] / "load" / "calibration.txt"
LEAST_BYTES, MOST_BYTES = 1 << 10, 1 << 20
_CURE = "Write the path of a text in UTF-8, of 1 KiB to 1 MiB, that every node has; or leave `calibration` out"


def text_of(path: str | None) -> str:
    """The text of a file, or sparkd's own. Raises CheckpointError for a file that is no text of 1 KiB to 1 MiB."""
    if path is None:
        return OWN.read_text(encoding="utf-8")
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"the text for the calibration cannot be read: {error.strerror}", file=path, cure=_CURE) from None
    if len(data) > MOST_BYTES or len(data.strip()) < LEAST_BYTES:
        size = f"over {MOST_BYTES:,}" if len(data) > MOST_BYTES else f"{len(data.strip()):,}"
        raise CheckpointError(f"the text for the calibration has {size} bytes", file=path, cure=_CURE)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise CheckpointError("the text for the calibration is not UTF-8", file=path, cure=_CURE) from None
