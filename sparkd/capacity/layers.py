"""Owns the list of a checkpoint's layers: name classes, counts, bytes, and what a recipe makes of them. Never reads a weight."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from sparkd.capacity.evidence import EXACT, GUESS, Consultation, Exact
from sparkd.capacity.kv_cache import Serving
from sparkd.capacity.weights import even_formats, inventory, refuse_incomplete
from sparkd.checkpoint import Checkpoint, TensorRef, tensor_class, towers_of
from sparkd.checkpoint.shape import shape_of
from sparkd.errors import CheckpointError, CheckpointIncomplete
from workers.quantization.formats import Format, fitting
from workers.quantization.packed_scale import packed_module_of
from workers.quantization.recipe import Assignment, QuantizationRecipe

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
# The tensors that stand beside an FP8 weight and go with it into its new format.
_SOURCE_SCALES = ("weight_scale_inv", "weight_scale", "input_scale", "scale")
# vLLM, about a model's headers.
Consult = Callable[[Checkpoint], Consultation]
Misfit = tuple[Format, int]  # a format, and columns that its groups do not divide


@dataclass(frozen=True, slots=True)
class LayerRow:
    """Tensors whose names differ in numbers only and that are alike otherwise. bytes, result_bytes: of all of them.

    format: spelling, None where they are handed on as they are. refused: the format that the recipe gives them and that they cannot have;
    nothing becomes of them then (result_bytes: None), because loading ends there.
    """

    name: str
    kind: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    format: str | None
    result_bytes: int | None
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class RankShare:
    """The parts of a checkpoint that one GPU holds under a recipe. bytes: of parameters and buffers; sureness: one of
    sparkd.capacity.evidence; unloaded: bytes of the parts that vLLM leaves on the disk. refusal: why vLLM takes the model not so,
    without a full stop, None where it does."""

    bytes: int
    sureness: str
    unloaded: Mapping[str, int]
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class LayerListing:
    """folder: the checkpoint's; quantization: how it is quantized already; notes: what the recipe's author should know. held: None where
    the model is of no kind that is counted."""

    folder: str
    quantization: str | None
    recipe: Mapping[str, Any]
    layers: tuple[LayerRow, ...]
    notes: tuple[str, ...]
    held: RankShare | None = None

    @property
    def bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers)

    @property
    def result_bytes(self) -> int | None:
        """None where loading would fail."""
        sizes = [layer.result_bytes for layer in self.layers]
        return None if None in sizes else sum(filter(None, sizes))

    def to_json(self) -> dict[str, Any]:
        names = ("name", "kind", "count", "shape", "dtype", "bytes", "format", "result_bytes", "refused")
        return {
            "folder": self.folder,
            "quantization": self.quantization,
            "quantize": dict(self.recipe),
            "layers": [{("class" if name == "kind" else name): getattr(layer, name) for name in names} for layer in self.layers],
            "count": sum(layer.count for layer in self.layers),
            "bytes": self.bytes,
            "result_bytes": self.result_bytes,
            "held": None if self.held is None else asdict(self.held),
            "notes": list(self.notes),
        }


def layers_of(checkpoint: Checkpoint, recipe: QuantizationRecipe, consult: Consult | None = None, *, wide: bool = False) -> LayerListing:
    """The layers and what one GPU holds of them. consult: vLLM, about the model. wide: the entry asks for float32.

    Raises CheckpointError.
    """
    layers = listing(checkpoint, recipe)
    try:
        return replace(layers, held=held(checkpoint, recipe, consult, wide=wide))
    except CheckpointIncomplete as error:
        return replace(layers, notes=(*layers.notes, error.message))


def listing(checkpoint: Checkpoint, recipe: QuantizationRecipe) -> LayerListing:
    """A checkpoint's layers and what `recipe` makes of them, in the order in which the classes first occur."""
    formats = recipe.assign(checkpoint)
    towers = towers_of(checkpoint.config)
    sums_of: dict[tuple[str, tuple[int, ...], str, str | None, bool], list[int]] = {}
    misfits: dict[Misfit, int] = {}
    for name, tensor in checkpoint.tensors.items():
        spelling, result = _result(tensor, formats, checkpoint.config)
        misfit = _misfit(tensor, formats, checkpoint)
        if misfit is not None and result:
            misfits[misfit] = misfits.get(misfit, 0) + 1
        key = _NUMBER.sub("*", name), tensor.shape, tensor.dtype, spelling, misfit is not None
        sums = sums_of.setdefault(key, [0, 0, 0])
        sums[0] += 1
        sums[1] += tensor.nbytes
        sums[2] += result
    layers = tuple(
        LayerRow(name, tensor_class(name.replace("*", "0"), shape, towers), count, shape, dtype, stored, *_outcome(spelling, result, fails))
        for (name, shape, dtype, spelling, fails), (count, stored, result) in sums_of.items()
    )
    warnings = (
        f"{form.spelling} needs a multiple of {form.group} columns, and there are {columns} in {count} weights: loading them would fail, "
        f"so leave them unquantized or give them {fitting(form.group or columns, columns, form.name)}."
        for (form, columns), count in misfits.items()
    )
    source = checkpoint.quantization.method if checkpoint.quantization else None
    return LayerListing(checkpoint.folder, source, recipe.canonical(), layers, (*formats.adjustments, *warnings))


def held(checkpoint: Checkpoint, recipe: QuantizationRecipe, consult: Consult | None, *, wide: bool) -> RankShare | None:
    """By vLLM's own answer where there is one; it is not asked about float32. None where nothing can be said of the weights.

    Raises CheckpointIncomplete for a checkpoint with fewer layers than its config.json says.
    """
    try:
        contents = inventory(checkpoint, shape_of(checkpoint.config))
        refuse_incomplete(contents)
        contents = contents.widened() if wide else contents
        formatted = contents.formatted(recipe)
        weights = formatted.weights()
    except CheckpointIncomplete:
        raise
    except CheckpointError:
        return None
    exact = Exact()
    # Groups that do not divide the columns are among the notes, with what would fit; vLLM would name nothing.
    if consult is not None and not wide and even_formats(formatted) is None:
        consultation = consult(contents.checkpoint)
        consultation.ask([(recipe, 1, 1)])
        exact = consultation.exact(recipe, Serving(1))
    size = weights.bytes if exact.weight_bytes is None else exact.weight_bytes
    sureness = GUESS if exact.weight_bytes is None else EXACT
    return RankShare(size, sureness, contents.unloaded, exact.refusal)


def _outcome(spelling: str | None, result: int, fails: bool) -> tuple[str | None, int | None, str | None]:
    """Format, bytes and the format that was refused, of a LayerRow."""
    return (None, None, spelling) if fails else (spelling, result, None)


def _scaled(name: str, formats: Assignment) -> str | None:
    """The module that a tensor of this name is a scale of, where that gets a new format."""
    stem, _, last = name.rpartition(".")
    if last in _SOURCE_SCALES and stem in formats:
        return stem
    packed = packed_module_of(name) if "scale" in last else None
    return packed if packed is not None and packed in formats else None


def _misfit(tensor: TensorRef, formats: Assignment, checkpoint: Checkpoint) -> Misfit | None:
    """Where the format of a weight, or of the one that it is a scale of, cannot be (workers/load/formats/base.py, Quantizer.check)."""
    module = _scaled(tensor.name, formats) or tensor.name.removesuffix(".weight")
    weight = checkpoint.tensors.get(f"{module}.weight") or checkpoint.tensors.get(module)
    chosen = formats.get(module)
    if weight is None or chosen is None or chosen.group is None:
        return None
    columns = _sides(weight, checkpoint.config)[1]
    return (chosen, columns) if columns % chosen.group else None


def _result(tensor: TensorRef, formats: Assignment, config: Mapping[str, Any]) -> tuple[str | None, int]:
    """(spelling, bytes) of what vLLM is handed for one tensor."""
    name = tensor.name
    stem, _, last = name.rpartition(".")
    if (module := _scaled(name, formats)) is not None:
        return formats[module].spelling, 0
    chosen = formats.get(name.removesuffix(".weight")) if last == "weight" else formats.get(name)
    if chosen is None:
        return None, tensor.nbytes
    rows, columns = _sides(tensor, config)
    blocks = tensor.shape[0] if len(tensor.shape) == 3 else 1
    if blocks > 1 and (last == "gate_up_proj" or stem.endswith(".input_linear")):
        # One weight each for gate and up.
        return chosen.spelling, 2 * blocks * chosen.nbytes(rows // 2, columns)
    return chosen.spelling, blocks * chosen.nbytes(rows, columns)


def _sides(tensor: TensorRef, config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns as vLLM multiplies them: packed experts may be stored either way round, and the model's width tells which."""
    rows, columns = tensor.shape[-2:]
    if len(tensor.shape) == 2:
        return rows, columns
    text = config.get("text_config")
    width = config.get("hidden_size") or (text.get("hidden_size") if isinstance(text, Mapping) else None)
    gate = "gate" in tensor.name.rpartition(".")[2] or "input" in tensor.name
    return (columns, rows) if width != (columns if gate else rows) and width == (rows if gate else columns) else (rows, columns)
