"""The layers of a checkpoint: names, classes, counts, bytes, and what a recipe makes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from sparkd.capacity.weights import PartGroup, inventory
from sparkd.checkpoint import Checkpoint
from sparkd.checkpoint.shape import shape_of
from workers.quantization.formats import Format, fitting
from workers.quantization.recipe import QuantizationRecipe


@dataclass(frozen=True, slots=True)
class LayerRow:
    """Tensors whose names differ in numbers only and that are alike otherwise. `kind` is `class` in the JSON.

    bytes, result_bytes: of all of them.
    format: spelling, None where they are handed on as they are.
    refused: the format that the recipe gives them and that they cannot have; nothing becomes of them then (result_bytes: None), because
        loading ends there.
    """

    name: str
    kind: str = field(metadata={"serialization_alias": "class"})
    count: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    format: str | None
    result_bytes: int | None
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class LayerListing:
    """A checkpoint's layers.

    folder: the checkpoint's.
    quantization: how it is quantized already.
    quantize: the recipe.
    result_bytes: None where loading would fail.
    notes: what the recipe's author should know.
    """

    folder: str
    quantization: str | None
    quantize: Mapping[str, Any]
    layers: tuple[LayerRow, ...]
    count: int
    bytes: int
    result_bytes: int | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        shown: dict[str, Any] = TypeAdapter(LayerListing).dump_python(self, mode="json", by_alias=True)
        return shown


def layers_of(checkpoint: Checkpoint, recipe: QuantizationRecipe) -> LayerListing:
    """The layers in the order in which their classes first occur. Raises CheckpointError as Inventory.formatted."""
    # All that is stored: a list also has the layers that vLLM leaves on the disk.
    stored = inventory(checkpoint, replace(shape_of(checkpoint.config), tied=False), ahead=True).formatted(recipe)
    misfits: Counter[tuple[Format, int]] = Counter()
    for group in stored.groups:
        if group.form is not None and group.misfit is not None:
            misfits[group.form, group.misfit] += group.times * group.part.count
    warnings = (
        f"{form.spelling} needs a multiple of {form.group} columns, and there are {columns} in {count} weights: loading them would fail, "
        f"so leave them unquantized or give them {fitting(form.group or columns, columns, form.name)}."
        for (form, columns), count in misfits.items()
    )
    layers = tuple(map(_row, stored.groups))
    results = [layer.result_bytes for layer in layers]
    return LayerListing(
        folder=checkpoint.folder,
        quantization=checkpoint.quantization.method if checkpoint.quantization else None,
        quantize=recipe.canonical(),
        layers=layers,
        count=sum(layer.count for layer in layers),
        bytes=sum(layer.bytes for layer in layers),
        result_bytes=None if None in results else sum(filter(None, results)),
        notes=(*stored.notes, *warnings),
    )


def _row(group: PartGroup) -> LayerRow:
    part, count = group.part, group.times * group.part.count
    spelling = None if group.form is None else group.form.spelling
    outcome = (None, None, spelling) if group.misfit is not None else (spelling, count * group.handed_bytes, None)
    return LayerRow(group.name, part.kind, count, part.tensor.shape, part.tensor.dtype, count * part.tensor.nbytes, *outcome)
