"""Owns what the calibration of formats with 4-bit activations takes at a first load, and whether it is kept already. Never runs a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sparkd.capacity.weights import FormattedModel
from sparkd.checkpoint import Checkpoint
from sparkd.errors import CheckpointError
from sparkd.hardware import Hardware
from workers.quantization.calibration_file import BESIDE_BYTES, SPARE_BYTES, calibration_file
from workers.quantization.calibration_text import text_of
from workers.quantization.recipe import QuantizationRecipe

# The child that imports torch and transformers, with 512 tokens of SmolLM2-135M: 4.3 to 5.0 s on two cores of an x86_64 CPU, in a load of
# vLLM 0.32 whose own imports had read the same files before.
CHILD_S = 5.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """One run of the unquantized model. seconds: None where the disk's rate is not known; free_bytes: that must be free for it; fits:
    whether a node without other models has them."""

    seconds: float | None
    free_bytes: int
    fits: bool


def calibration_of(model: FormattedModel, hardware: Hardware, held_bytes: int) -> Calibration | None:
    """None where no weight gets such a format, or transformers could not run the checkpoint as it is stored. held_bytes: what the rank has
    allocated on the GPU by then, room for all its weights."""
    inventory = model.inventory
    rounds = any(one.form is not None and one.form.rounds_activations for one in model.groups)
    if not rounds or inventory.checkpoint.quantization is not None:
        return None
    free_bytes = inventory.stored_bytes + BESIDE_BYTES + SPARE_BYTES
    # Where the device has memory of its own, that of the host is not known here.
    fits = not hardware.unified or free_bytes + held_bytes <= hardware.memory_bytes - hardware.system_bytes
    seconds = None if hardware.disk_bytes_s is None else inventory.stored_bytes / hardware.disk_bytes_s + CHILD_S
    return Calibration(seconds if fits else 0.0, free_bytes, fits)


def kept_in(cache_dir: str | None, checkpoint: Checkpoint) -> Callable[[QuantizationRecipe], bool]:
    """A function that says whether an earlier load has calibrated this checkpoint over the recipe's text. cache_dir: the folder of
    quantized weights, None for none."""

    def is_kept(recipe: QuantizationRecipe) -> bool:
        if cache_dir is None or not recipe.rounds_activations:
            return False
        try:
            return calibration_file(cache_dir, checkpoint, text_of(recipe.calibration)).stat().st_size > 0
        except (OSError, CheckpointError):
            return False

    return is_kept
