"""Owns which ways of splitting a model over ranks vLLM accepts, and the sentence where it does not. Never counts a byte."""

from __future__ import annotations

from collections.abc import Iterator

from sparkd.capacity.weights import FormattedModel, PartGroup, WeightPart, padded_vocabulary, sides
from sparkd.checkpoint import SourceQuantization
from sparkd.models.architectures import is_checked
from sparkd.models.shape import RecurrentState, Shape
from workers.quantization.formats import Format, fitting

# FP8 in blocks of 128x128: neither side of a block is cut (vllm/model_executor/layers/quantization/utils/fp8_utils.py,
# validate_fp8_block_shape).
BLOCK = 128
# Nodes that a model may be split over.
MOST_RANKS = 8
# The blocks of a checkpoint's experts may be cut into parts of this size, each with the scale of its block
# (vllm/model_executor/layers/fused_moe/oracle/fp8.py, refine_fp8_moe_block_shape). Beside weights that sparkd quantizes they stay whole:
# compressed-tensors, whose names those have, refines nothing.
EXPERT_BLOCK = 32


def refusal(model: FormattedModel, ranks: int, stages: int, platform: str = "cuda") -> str | None:
    """Why not, with the number that breaks it; None where it is legal. ranks: tensor-parallel size; stages: pipeline-parallel size;
    platform: whose kernels.
    """
    return unsplit(model, ranks, stages) or unfit(model, ranks, platform)


def unsplit(model: FormattedModel, ranks: int, stages: int) -> str | None:
    """Why the model cannot be split so, whatever becomes of its weights; as `refusal`."""
    return next(_refusals(model, ranks, stages), None)


def unfit(model: FormattedModel, ranks: int, platform: str = "cuda") -> str | None:
    """Why the weights cannot have the recipe's formats, which vLLM does not see before it loads them; as `refusal`."""
    return next(_unfit(model, ranks, platform), None)


def possible_ranks(shape: Shape, ranks: int) -> str:
    """The other sizes of tensor parallelism by which its heads divide, in words."""
    return ", ".join(str(size) for size in range(1, MOST_RANKS + 1) if size != ranks and not any(uneven_heads(shape, size)))


def _unfit(model: FormattedModel, ranks: int, platform: str) -> Iterator[str]:
    yield from uneven_groups(model)
    if platform == "cuda":
        yield from _torn_blocks(model)
    if ranks > 1 and is_checked(model.inventory.shape):
        for one in _cut(model):
            if one.form is not None:
                yield from _units(one.part, _unit(one.part, one.form), model.inventory.shape, ranks)


def _refusals(model: FormattedModel, ranks: int, stages: int) -> Iterator[str]:
    shape = model.inventory.shape
    if 0 < shape.layers < stages:
        yield f"{shape.layers} layers are fewer than {stages} stages"
    yield from uneven_heads(shape, ranks)
    if ranks > 1 and is_checked(shape):
        yield from _widths(model, ranks)


def _torn_blocks(model: FormattedModel) -> Iterator[str]:
    """Reasons why blocks do not divide the columns, as in workers/vllm/load/supported.py."""
    for one in model.groups:
        lengths = one.part.tensor.shape
        if one.form is not None and one.form.name == "fp8_block" and len(lengths) == 2 and lengths[1] % BLOCK:
            yield f"{lengths[1]} columns of {one.part.tensor.name} do not divide into blocks of {BLOCK}: fp8 would fit"


def uneven_groups(model: FormattedModel) -> Iterator[str]:
    """The columns that share a scale must divide a weight's, on one rank too (workers/load/formats/base.py, Quantizer.check)."""
    for name, columns, form, fits in _uneven(model):
        yield f"{columns} columns of {name} do not divide into groups of {form.group}: {fits} would fit"


def even_formats(model: FormattedModel) -> str | None:
    """The formats for the first weight of `uneven_groups`, in words; None where there is none."""
    return next((fits for *_, fits in _uneven(model)), None)


def _uneven(model: FormattedModel) -> Iterator[tuple[str, int, Format, str]]:
    """(tensor, its columns, its format, formats that fit)."""
    for one in model.groups:
        if one.form is None or one.form.group is None:
            continue
        columns = sides(one.part.tensor, model.inventory.shape)[1]
        if columns % one.form.group:
            yield one.part.tensor.name, columns, one.form, fitting(one.form.group, columns, one.form.name)


def uneven_heads(shape: Shape, ranks: int) -> Iterator[str]:
    """Why so many ranks cannot share its heads: vllm/config/model.py, verify_with_parallel_config; vllm/distributed/utils.py, divide."""
    if shape.heads % ranks:
        yield f"{shape.heads} attention heads do not divide by {ranks} ranks"
    if not is_checked(shape):
        return  # how a class splits the rest is its own
    if max(shape.kv_heads, ranks) % min(shape.kv_heads, ranks):
        yield f"{shape.kv_heads} KV heads and {ranks} ranks: neither divides by the other"
    for state in dict.fromkeys(one for one in shape.mixers if isinstance(one, RecurrentState)):
        if state.heads % ranks:
            yield f"{state.heads} heads of linear attention do not divide by {ranks} ranks"
        if state.key_heads % ranks:
            yield f"{state.key_heads} key heads of linear attention do not divide by {ranks} ranks"


def _cut(model: FormattedModel) -> Iterator[PartGroup]:
    """The matrices that ranks have parts of."""
    for one in model.groups:
        if one.part.split != "whole" and one.part.kind not in ("vision", "state_space") and len(one.part.tensor.shape) in (2, 3):
            yield one


def _widths(model: FormattedModel, ranks: int) -> Iterator[str]:
    """A side that is cut needs a multiple of the ranks, and no group or block of the checkpoint's own with one scale may be cut."""
    source = model.inventory.checkpoint.quantization
    for one in _cut(model):
        yield from _width(one.part, source, model.inventory.shape, ranks)
        if one.form is None and one.part.kind != "scale":
            yield from _units(one.part, _stored_unit(one.part, source, is_refined=not model.recipe.quantizes), model.inventory.shape, ranks)


def _across(part: WeightPart, shape: Shape) -> tuple[int, str]:
    """The side that is cut, and its name."""
    rows, columns = sides(part.tensor, shape)
    return (columns, "columns") if part.split == "row" else (rows, "rows")


def _width(part: WeightPart, source: SourceQuantization | None, shape: Shape, ranks: int) -> Iterator[str]:
    name, (rows, columns), ways = part.tensor.name, sides(part.tensor, shape), part.ways(ranks)
    if part.split == "vocabulary":
        if padded_vocabulary(rows) % ranks:
            yield f"{padded_vocabulary(rows)} rows of {name} (with padding) do not divide by {ranks} ranks"
        return
    across, called = _across(part, shape)
    if part.kind == "scale":
        # Each is for a group of columns. gpt-oss is the exception: its kernels pad what a cut leaves over.
        if part.split == "row" and columns % ways and (source is None or source.method not in ("mxfp4", "fp8_block")):
            yield f"{columns} groups of columns in {name} do not divide by {ranks} ranks"
    elif across % ways:
        yield f"{across} {called} of {name} do not divide by {ranks} ranks"


def _units(part: WeightPart, unit: int | None, shape: Shape, ranks: int) -> Iterator[str]:
    """unit: rows or columns that belong together."""
    (across, called), ways = _across(part, shape), part.ways(ranks)
    if unit and part.split != "vocabulary" and across % ways == 0 and across // ways % unit:
        yield f"{across} {called} of {part.tensor.name} do not divide by {ranks} ranks into whole groups of {unit}"


def _unit(part: WeightPart, form: Format) -> int | None:
    """How many rows or columns of a weight that is quantized, whichever are cut, belong together."""
    if form.name == "fp8_block":
        return BLOCK
    return form.group if part.split == "row" else None


def _stored_unit(part: WeightPart, source: SourceQuantization | None, *, is_refined: bool) -> int | None:
    """The same for one that stays as it is stored."""
    if source is None or source.method != "fp8_block" or not part.tensor.dtype.startswith("F8"):
        return None
    return EXPERT_BLOCK if is_refined and part.kind == "expert" else BLOCK
