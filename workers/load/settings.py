"""Reads the settings of the load format `spark_stream` from `--model-loader-extra-config`. Standard library only; opens no file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkd.errors import CheckpointError
from workers.quantization.recipe import QuantizationRecipe

KEYS = ("quantize", "cache_dir", "cache_limit_bytes", "progress", "ring_bytes", "block_bytes", "direct", "enable_weights_track")
BLOCK_BYTES = 8 * 2**20
RING_BYTES = 64 * 2**20
# A CPU quantizes 0.2 GB/s: half of a GPU's ring keeps it busy, and more would waste memory (`python -m tests.bench.loader`).
CPU_RING_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """The loader's own settings.

    cache_dir: folder of quantized checkpoints, None for no cache. progress: file for the load's progress. ring_bytes: memory for reads in
    flight; None for the device's default.
    direct: False forbids O_DIRECT, True requires it, None uses it where the file system has it. enable_weights_track: False loads a model
    although the checkpoint lacks weights, as for vLLM's setting of the same name.
    """

    recipe: QuantizationRecipe
    cache_dir: str | None = None
    cache_limit_bytes: int | None = None
    progress: str | None = None
    ring_bytes: int | None = None
    block_bytes: int = BLOCK_BYTES
    direct: bool | None = None
    enable_weights_track: bool = True

    @classmethod
    def parse(cls, raw: Any) -> LoaderSettings:
        """Parse the settings. Raises CheckpointError with the name of a key that is unknown or has a wrong value."""
        if not isinstance(raw, Mapping):
            raise CheckpointError("--model-loader-extra-config must be a JSON object", cure='For instance {"quantize": "nvfp4"}')
        if unknown := sorted(set(raw) - set(KEYS)):
            raise CheckpointError(f"the load format spark_stream has no setting {unknown[0]!r}", cure=f"It has {', '.join(KEYS)}")
        settings = {key: value for key, value in raw.items() if value is not None}
        recipe = QuantizationRecipe.parse(settings.pop("quantize", None))
        for key, kind, what in (
            ("cache_dir", str, "a folder"),
            ("progress", str, "a file"),
            ("cache_limit_bytes", int, "a number of bytes"),
            ("ring_bytes", int, "a number of bytes"),
            ("block_bytes", int, "a number of bytes"),
            ("direct", bool, "true or false"),
            ("enable_weights_track", bool, "true or false"),
        ):
            if key not in settings:
                continue
            value = settings[key]
            is_of_kind = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
            if not is_of_kind or (isinstance(value, int) and kind is int and value <= 0):
                problem = f"the setting {key!r} of spark_stream must be {what}, not {value!r}"
                raise CheckpointError(problem, cure="Correct --model-loader-extra-config")
        parsed = cls(recipe=recipe, **settings)
        smallest = CPU_RING_BYTES if parsed.ring_bytes is None else parsed.ring_bytes
        if parsed.block_bytes % 4096 or smallest < 2 * parsed.block_bytes:
            raise CheckpointError(
                f"ring_bytes {smallest} and block_bytes {parsed.block_bytes} do not suit each other",
                cure="block_bytes is a multiple of 4096 and ring_bytes at least twice that",
            )
        return parsed

    def blocks(self, *, on_gpu: bool) -> int:
        """The number of blocks of the ring."""
        ring_bytes = self.ring_bytes or (RING_BYTES if on_gpu else CPU_RING_BYTES)
        return ring_bytes // self.block_bytes
