"""Measures the divisors of the inputs of layers with 4-bit activations, once for a checkpoint and a text, and keeps them in the folder of
the quantized cache.

A block of 16 activations has an E4M3 scale, whose normal values span 15 bits. So the divisor of a whole input need not be exact: the power
of two here leaves room for activations twice as large as the largest of the text, and those are still as precise.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from sparkd.checkpoint import Checkpoint
from workers.host.interpreter import module_command, program_environment
from workers.host.meminfo import mem_available_bytes

logger = logging.getLogger("vllm.sparkd.stream")

# 448, the largest E4M3 scale, times 6, the largest E2M1 value.
LARGEST = 2688.0
ROOM = 2.0
# The divisor of an input that was not measured: LARGEST is held, and a block of less than 0.006 becomes zero. SmolLM2-135M answers
# as well with it as with its own (0.139 nats against 0.140, activations alone).
UNMEASURED = 1.0
CURE = "Free memory and remove its quantized weights (`sparkd rm --cached`), so that the next load measures; or use nvfp4."
# In the folder of quantized weights.
FOLDER = ".calibrations"
# Memory that stays free for the rank and for others while the model runs: above the guard's first limit.
SPARE_BYTES = 8 << 30
# A higher number where the same text would give other figures.
_VERSION = 1
_PROGRAM = "workers.vllm.load.calibration_program"
_LIMIT_S = 1800.0
_DOWN = ("down_proj", "w2")
# The layers of a language model, whose parents transformers, vLLM and checkpoints name differently. A layer below any other name (a vision
# tower's, `mtp`) is another layer of the same number.
_LAYER = re.compile(r"(?:(?:model|language_model|text_model|backbone|transformer|decoder)\.)*(?P<rest>layers\.\d+\..+)")
_EXPERTS = re.compile(r"(?P<layer>.*?\d+)\..*\bexperts\.(?:\d+\.)?(?P<leaf>\w+)")


def divisor_of(largest: float) -> float:
    """The `input_global_scale` of an input whose largest magnitude this is: a power of two."""
    if not 0 < largest < math.inf:
        return UNMEASURED
    return math.ldexp(1.0, max(-60, min(60, math.floor(math.log2(LARGEST / (ROOM * largest))))))


class InputScales:
    """The divisors of a checkpoint's inputs. largest: the largest magnitude of what is multiplied with each parameter, by transformers'
    name of it without `.weight`."""

    def __init__(self, largest: Mapping[str, float]) -> None:
        self._largest: dict[str, float] = {}
        for name, value in largest.items():
            site = _site(name)
            for key in (site, _kind(site)):
                self._largest[key] = max(self._largest.get(key, 0.0), value)

    def of(self, module: str) -> float:
        """The divisor of a module, by its name in the checkpoint. All experts of a layer have one for each product. A layer that
        transformers leaves out (MTP) gets that of the layers with the largest input of its kind."""
        return divisor_of(self._of_site(_site(module)))

    def unmeasured(self, modules: Iterable[str]) -> int:
        """How many of these have no figure; all experts of a layer are one for each product."""
        return sum(not self._of_site(site) for site in {_site(module) for module in modules})

    def _of_site(self, site: str) -> float:
        return self._largest.get(site) or self._largest.get(_kind(site), 0.0)


def _site(name: str) -> str:
    layer = _LAYER.fullmatch(name)
    rest = layer["rest"] if layer else name
    experts = _EXPERTS.fullmatch(rest)
    return rest if experts is None else f"{experts['layer']}.{'experts_down' if experts['leaf'] in _DOWN else 'experts_up'}"


def _kind(site: str) -> str:
    return site.rpartition(".")[2]


def measured(checkpoint: Checkpoint, text: str, cache_dir: str | None) -> InputScales:
    """The first load of a checkpoint measures it, which reads the whole of it once more; the result is kept in cache_dir. Blocks; other
    ranks of the machine wait for the one that measures. Without cache_dir each call measures."""
    if cache_dir is None:
        return InputScales(_measured(checkpoint, text))
    path = _file_of(cache_dir, checkpoint, text)
    largest: dict[str, float] | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            largest = _kept(file)
            if not largest:
                largest = _measured(checkpoint, text)
                file.truncate(0)
                json.dump(largest, file)
    except OSError as error:
        logger.info("sparkd: the measurement is not kept: %s: %s.", error.filename or path, error.strerror)
    return InputScales(_measured(checkpoint, text) if largest is None else largest)


def _file_of(cache_dir: str, checkpoint: Checkpoint, text: str) -> Path:
    """The file with the figures of this checkpoint and text, which need not be there."""
    shards = [(os.path.basename(shard.path), shard.size_bytes, shard.mtime_ns, shard.header_sha256) for shard in checkpoint.shards]
    parts = [_VERSION, os.path.realpath(checkpoint.folder), shards, hashlib.sha256(text.encode()).hexdigest()]
    return Path(cache_dir, FOLDER, f"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}.json")


def _kept(file: IO[str]) -> dict[str, float]:
    """Empty where nothing was kept, or its writer ended in the midst."""
    file.seek(0)
    with suppress(ValueError):
        return dict(json.load(file))
    return {}


def _measured(checkpoint: Checkpoint, text: str) -> dict[str, float]:
    logger.info("sparkd: the inputs of the layers are measured over a text: transformers runs the model once, unquantized.")
    request: dict[str, Any] = {
        "folder": checkpoint.folder,
        "free_bytes": mem_available_bytes() - SPARE_BYTES,
        "text": text,
        "parent": os.getpid(),
    }
    try:
        child = subprocess.run(
            module_command(sys.executable, _PROGRAM),
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=program_environment(os.environ),
            timeout=_LIMIT_S,
            check=False,
        )
        if child.returncode == 0:
            largest = dict(json.loads(child.stdout)["largest"])
            if largest:
                return largest
        reason = f"signal {-child.returncode}" if child.returncode < 0 else child.stderr.strip().rpartition("\n")[2][:300]
    except subprocess.TimeoutExpired:
        reason = f"it took more than {_LIMIT_S:g} s"
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
    logger.warning("sparkd: the inputs of the layers were not measured: %s. %s", reason, CURE)
    return {}
