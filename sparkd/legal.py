"""Owns which ways of splitting a model over ranks vLLM accepts, and the sentence where it does not. Never counts a byte."""

from __future__ import annotations

from collections.abc import Iterator

from sparkd.model_shape import Shape, State
from sparkd.weight_cost import Inventory
from workers.stream.recipe import Recipe


def refusal(inventory: Inventory, recipe: Recipe, ranks: int, stages: int) -> str | None:
    """Why not, with the number that breaks it; None where it is legal. ranks: tensor-parallel size; stages: pipeline-parallel size."""
    return next(_refusals(inventory, recipe, ranks, stages), None)


def _refusals(inventory: Inventory, recipe: Recipe, ranks: int, stages: int) -> Iterator[str]:
    shape = inventory.shape
    if stages > shape.layers:
        yield f"{shape.layers} layers are fewer than {stages} stages"
    yield from _heads(shape, ranks)
    yield from _widths(inventory, recipe, ranks)


def _heads(shape: Shape, ranks: int) -> Iterator[str]:
    """vllm/config/model.py, verify_with_parallel_config; vllm/distributed/utils.py, divide."""
    if shape.heads % ranks:
        yield f"{shape.heads} attention heads do not divide by {ranks} ranks"
    more, fewer = max(shape.kv_heads, ranks), min(shape.kv_heads, ranks)
    if more % fewer:
        yield f"{shape.kv_heads} KV heads and {ranks} ranks: neither divides by the other"
    for state in {one for one in shape.mixers if isinstance(one, State)}:
        if state.heads % ranks:
            yield f"{state.heads} heads of linear attention do not divide by {ranks} ranks"
        if state.groups > 1 and state.groups % ranks:
            yield f"{state.groups} groups of Mamba-2 do not divide by {ranks} ranks"


def _widths(inventory: Inventory, recipe: Recipe, ranks: int) -> Iterator[str]:
    """A row-parallel weight is cut across its columns, and no group of columns with one scale may be cut."""
    if ranks == 1:
        return
    formats = recipe.assign(inventory.checkpoint)
    for part in inventory.parts:
        tensor = part.tensor
        if part.split not in ("column", "row") or len(tensor.shape) < 2 or part.kind in ("vision", "scale", "state_space"):
            continue
        rows, columns = tensor.shape[-2:]
        form = formats.get(tensor.name.removesuffix(".weight"))
        across = columns if part.split == "row" or tensor.name.split(".")[-2:][0] in ("down_proj", "w2") else rows
        if across % ranks:
            yield f"{across} columns or rows of {tensor.name} do not divide by {ranks} ranks"
        elif form is not None and form.group and across == columns and columns // ranks % form.group:
            yield f"{columns} columns of {tensor.name} over {ranks} ranks are no whole groups of {form.group} ({form.spelling})"
