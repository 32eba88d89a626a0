"""Owns what was measured of checkpoints for `quantize: best`: in a child of an engine's Python, and kept on disk. Never imports torch."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparkd.errors import EngineError, StateError
from sparkd.inquiry.parser_answers import put
from workers.quantization.mix import UNMEASURED, MixErrors
from workers.vllm.ask.model_question import told

# A file of a model with 100 layers has some 100 kB.
_MOST_FILE_BYTES = 16 << 20
# The longest silence: reading the weights of a large model from a slow disk.
_SILENCE_S = 1200.0
_PROGRAM = "workers.load.mix_program"


def mix_folder(profiles: Path | str) -> Path:
    """The folder of measurements, beside that of profiles."""
    return Path(profiles).with_name("mixes")


def kept_errors(identity: str | None, folder: Path) -> MixErrors:
    """The measurement of the checkpoint with this identity (workers.kv.profiles.checkpoint_of); UNMEASURED where no file has it."""
    if identity is None:
        return UNMEASURED
    path = folder / f"{identity}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        if path.stat().st_size <= _MOST_FILE_BYTES:
            return _read(json.loads(path.read_bytes()))
    return UNMEASURED


def measure(
    checkpoint: str,
    identity: str,
    python: Path,
    folder: Path,
    free_bytes: int,
    *,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> MixErrors:
    """Measure a checkpoint's folder and keep the result. Blocks for minutes.

    python: of an environment with torch and transformers. free_bytes: that the child may take for the model; with less it only compares
    weights. progress: called with the number of units that are measured, and of all. Raises EngineError where the child gives no answer.
    """
    tail = ""
    for line in told(python, _PROGRAM, {"folder": checkpoint, "free_bytes": free_bytes}, threading.Event(), _SILENCE_S):
        if "done" in line:
            progress(line["done"], line["of"])
        elif "errors" in line:
            measured = _read(line)
            with contextlib.suppress(OSError, StateError):
                put(folder / f"{identity}.json", json.dumps(line))
            return measured
        tail = line.get("ended", tail)
    raise EngineError(
        f"The weights of {checkpoint} could not be measured for `quantize: best`: {tail or 'the program ended without a message'}."
    )


def _read(raw: Any) -> MixErrors:
    errors = {str(key): {str(spelling): float(error) for spelling, error in of_unit.items()} for key, of_unit in raw["errors"].items()}
    return MixErrors(errors, {str(key): float(value) for key, value in raw["sensitivities"].items()})
