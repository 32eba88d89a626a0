"""Exports a quantized checkpoint: copies it from the cache, or quantizes the source unit by unit. Never needs vLLM: it asks an installed
one only whether a model class with restrictions accepts the formats.

    python -m workers.vllm.export < REQUEST

A separate program, because it runs in the Python environment that has torch. REQUEST is a JSON object of the fields of ExportRequest;
stdout gets one JSON object a line: {"event": "progress", "from", "bytes_done", "bytes_total"}, from `calibration` while the inputs of
layers are measured, at the end {"event": "done", "from", "bytes"} or {"event": "error", "message"}. SIGINT and SIGTERM end it and leave
nothing, as does a reader of its output that has gone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sparkd.checkpoint import Checkpoint, read_checkpoint
from sparkd.errors import CheckpointError, ConfigError, MissingSymbol
from workers.cache.atomic_folder import appearing
from workers.cache.layout import companions_bytes, lay_out, neighbours, write_companions
from workers.cache.manifest import on_device
from workers.cache.store import CachedCheckpoint, find
from workers.cache.writer import MARGIN_BYTES, MIB, ShardWriter, Staging, layout_of
from workers.files.direct_file import DirectFile
from workers.load.input_scales import measured
from workers.load.pipeline import Pipeline, Receivers
from workers.load.reader import ByteRange, Reader
from workers.load.virtual import VirtualCheckpoint
from workers.quantization.calibration_text import text_of
from workers.quantization.formats import Format
from workers.quantization.recipe import QuantizationRecipe
from workers.vllm.load.config import linear_modules, quantization_config, refuse_unserved

GIB = 1 << 30
EVERY_S = 0.25
# A small ring is enough, because the export waits for the disk.
STAGING_BYTES, BLOCK_BYTES = 16 * MIB, 2 * MIB
INTERRUPTED = 130
_DTYPES: Mapping[str, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """source: the checkpoint's folder; quantize: a canonical recipe; target: a new folder, or an empty one; device: cpu, cuda, or auto."""

    source: str
    quantize: Mapping[str, Any]
    target: str
    cache_dir: str | None = None
    device: str = "auto"


def main() -> int:
    """Exit code: 0 done, 1 refused or failed and said why, 130 interrupted."""
    # Set for SIGINT too, because a shell's background jobs ignore it (POSIX sh, 2.11), and Python keeps that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        request = ExportRequest(**json.load(sys.stdin))
        source, size_bytes = export(request, _Progress())
        _say(event="done", **{"from": source}, bytes=size_bytes)
    except (CheckpointError, ConfigError) as error:
        _say(event="error", message=error.message)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        where = error.filename or request.target
        _say(event="error", message=f"{where}: the disk is full. Free some." if full else f"{where}: {error.strerror}.")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def export(request: ExportRequest, tell: Tell) -> tuple[str, int]:
    """("cache" or "checkpoint", bytes of the weights). Raises CheckpointError, OSError; then, and if interrupted, nothing stays.

    tell: called with (source, bytes done, total bytes).
    """
    recipe = QuantizationRecipe.parse(request.quantize)
    checkpoint = read_checkpoint(request.source)
    formats = recipe.assign(checkpoint)
    _refuse_unserved(checkpoint, formats)
    with appearing(request.target) as writing:
        done = _copied(request, checkpoint, recipe, writing, tell)
        if done is None:
            done = "checkpoint", _quantize(request, checkpoint, recipe, formats, writing, tell)
    return done


def _refuse_unserved(checkpoint: Checkpoint, formats: Mapping[str, Format]) -> None:
    """Raise CheckpointError for formats that this vLLM's model class could not take. Refuse nothing where there is no vLLM, or one without
    the symbols to ask: another vLLM may serve the export."""
    # vLLM's logger writes to stdout, which is reserved for the reader of this program.
    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(MissingSymbol):
        refuse_unserved(checkpoint, formats, tensor_parallel_size=1)


def _copied(request: ExportRequest, checkpoint: Checkpoint, recipe: QuantizationRecipe, folder: str, tell: Tell) -> tuple[str, int] | None:
    """Export the cache's entry; None where there is none."""
    if request.cache_dir is None:
        return None
    entries = (find(request.cache_dir, checkpoint, on_device(recipe.canonical(), device)) for device in ("cuda", "cpu"))
    cached = next((entry for entry in entries if entry is not None), None)
    if cached is None:
        return None
    with cached:
        return "cache", _copy(cached, folder, tell)


def _copy(cached: CachedCheckpoint, folder: str, tell: Tell) -> int:
    """Copy the entry's files, without those that only a cache needs. Returns their bytes."""
    files = cached.manifest.files
    total = sum(file.size_bytes for file in files)
    _check_room(folder, total)
    done = 0
    for file in files:
        path = os.path.join(cached.folder, file.name)
        os.makedirs(os.path.dirname(os.path.join(folder, file.name)), exist_ok=True)
        target = DirectFile(os.path.join(folder, file.name), size_bytes=file.size_bytes)
        try:
            target.reserve()
            with Reader([ByteRange(file.name, path, 0, file.size_bytes)], pin=False) as reader:
                for chunk in reader:
                    target.write(chunk.start, memoryview(chunk.view.numpy()))
                    done += chunk.view.numel()
                    chunk.release()
                    tell("cache", done, total)
            target.settle()
        finally:
            target.close()
    return sum(shard.size_bytes for shard in cached.checkpoint.shards)


def _quantize(
    request: ExportRequest, checkpoint: Checkpoint, recipe: QuantizationRecipe, formats: Mapping[str, Format], folder: str, tell: Tell
) -> int:
    if not formats:
        problem = f"is quantized already ({checkpoint.quantization.method})" if checkpoint.quantization else "has nothing that it quantizes"
        raise CheckpointError(f"this checkpoint {problem}", file=checkpoint.folder, cure="Copy it as it is, or give another recipe")
    described = quantization_config(formats, linear_modules(checkpoint))
    virtual = VirtualCheckpoint(checkpoint, formats)
    shards = lay_out(neighbours(layout_of(virtual)))
    _check_room(folder, sum(shard.size_bytes for shard in shards) + companions_bytes(checkpoint.folder) + MARGIN_BYTES)
    if any(form.rounds_activations for form in formats.values()):
        tell("calibration", 0, 0)
        virtual.input_scale = measured(checkpoint, text_of(recipe.calibration), request.cache_dir).of
    device = _device(request.device)
    on_gpu = device.type == "cuda"
    writer = ShardWriter(folder, shards, Staging(STAGING_BYTES, BLOCK_BYTES, pin=on_gpu, threads=2))
    watcher = _Watcher(tell)
    receivers = Receivers(writer, watcher)
    pipeline = Pipeline(virtual, device, partial(Reader, pin=on_gpu), receivers=receivers, dtype=_dtype(checkpoint.config))
    watcher.total = pipeline.bytes_total
    try:
        for _ in pipeline.tensors():
            # The sink has taken the tensors.
            pass
        writer.settle()
    finally:
        writer.close()
    write_companions(checkpoint, folder, described, shards)
    return writer.bytes_total


class _Watcher:
    def __init__(self, tell: Tell) -> None:
        self.total = 0
        self._tell = tell

    def advance(self, bytes_done: int, _units_done: int) -> None:
        self._tell("checkpoint", bytes_done, self.total)


class _Progress:
    """A line on stdout, at most four a second."""

    def __init__(self) -> None:
        self._told_s = 0.0

    def __call__(self, source: str, bytes_done: int, bytes_total: int) -> None:
        if time.monotonic() - self._told_s >= EVERY_S or bytes_done == bytes_total:
            self._told_s = time.monotonic()
            _say(event="progress", **{"from": source}, bytes_done=bytes_done, bytes_total=bytes_total)


def _say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _check_room(folder: str, need_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < need_bytes:
        problem = f"it needs {need_bytes / GIB:.1f} GiB and its disk has {free_bytes / GIB:.1f} GiB free"
        raise CheckpointError(problem, file=os.path.dirname(folder), cure="Free some, or give a folder on another disk")


def _device(name: str) -> torch.device:
    """The device of a name. Raises CheckpointError for cuda without a CUDA device."""
    if name == "cuda" and not torch.cuda.is_available():
        raise CheckpointError("this Python's torch sees no CUDA device", cure="Leave --device out, or set engine.runtime")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype that an FP8 source is dequantized to: the model's own dtype, as vLLM takes it from config.json."""
    text = config.get("text_config")
    holders = [config, text] if isinstance(text, Mapping) else [config]
    named = [str(holder.get(key)).removeprefix("torch.") for holder in holders for key in ("dtype", "torch_dtype")]
    return next((_DTYPES[name] for name in named if name in _DTYPES), torch.bfloat16)


if __name__ == "__main__":
    sys.exit(main())
