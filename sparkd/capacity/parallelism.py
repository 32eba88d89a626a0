"""Checks of a split and of formats without vLLM: heads must divide by the ranks, and columns by the groups."""

from __future__ import annotations

from collections.abc import Iterator

from sparkd.capacity.weights import FormattedModel, sides
from sparkd.checkpoint.shape import Shape
from workers.quantization.formats import Format, fitting

# Nodes that a model may be split over.
MOST_RANKS = 8


def uneven_heads(shape: Shape, ranks: int) -> str | None:
    """Why so many ranks cannot share its heads (vllm/config/model.py, verify_with_parallel_config); None where they can."""
    return f"{shape.heads} attention heads do not divide by {ranks} ranks" if shape.heads % ranks else None


def possible_ranks(shape: Shape, ranks: int) -> str:
    """The other sizes of tensor parallelism by which its heads divide, in words."""
    return ", ".join(str(size) for size in range(1, MOST_RANKS + 1) if size != ranks and uneven_heads(shape, size) is None)


def uneven_groups(model: FormattedModel) -> str | None:
    """Why the loader would refuse the formats: the columns that share a scale must divide a weight's (Quantizer.check of
    workers/load/formats/base.py)."""
    uneven = next(_uneven(model), None)
    if uneven is None:
        return None
    name, columns, form, fits = uneven
    return f"{columns} columns of {name} do not divide into groups of {form.group}: {fits} would fit"


def even_formats(model: FormattedModel) -> str | None:
    """The formats for the weight of `uneven_groups`, in words; None where there is none."""
    return next((fits for *_, fits in _uneven(model)), None)


def _uneven(model: FormattedModel) -> Iterator[tuple[str, int, Format, str]]:
    """(tensor, its columns, its format, formats that fit)."""
    for one in model.groups:
        if one.form is None or one.form.group is None:
            continue
        columns = sides(one.part.tensor, model.inventory.shape)[1]
        if columns % one.form.group:
            yield one.part.tensor.name, columns, one.form, fitting(one.form.group, columns, one.form.name)
