"""Owns which ways of splitting a model over ranks vLLM accepts, and the sentence where it does not. Never counts a byte."""

from __future__ import annotations

from collections.abc import Iterator

from sparkd.checkpoint import SourceQuantization
from sparkd.model_shape import Shape, State
from sparkd.weight_cost import Inventory, Part, padded_vocabulary, sides
from workers.stream.format import Format, fitting
from workers.stream.recipe import Recipe

# FP8 in blocks of 128x128: neither side of a block is cut (vllm/model_executor/layers/quantization/utils/fp8_utils.py,
# validate_fp8_block_shape).
BLOCK = 128

# Architectures that vLLM has, and whose classes have no SupportsPP (vllm/model_executor/models/registry.py, is_pp_supported_model; releases
# 0.26 and 0.32): it starts no pipeline of them (vllm/config/model.py, verify_with_parallel_config).
WITHOUT_PIPELINES = frozenset(
    {
        "AriaForConditionalGeneration",
        "CohereAsrForConditionalGeneration",
        "DeepseekV4ForConditionalGeneration",
        "DiffusionGemmaForBlockDiffusion",
        "FireRedASR2ForConditionalGeneration",
        "FireRedLIDForConditionalGeneration",
        "FunASRForConditionalGeneration",
        "Gemma3nForCausalLM",
        "Gemma3nForConditionalGeneration",
        "HrmTextForCausalLM",
        "IQuestLoopCoderForCausalLM",
        "Idefics3ForConditionalGeneration",
        "Mamba2ForCausalLM",
        "NemotronH_Nano_Omni_Reasoning_V3",
        "NemotronH_Nano_VL_V2",
        "NemotronH_Omni_Reasoning_V3",
        "NemotronH_Super_Omni_Reasoning_V3",
        "NemotronParseForConditionalGeneration",
        "OuroForCausalLM",
        "PaddleOCRVLForConditionalGeneration",
        "Phi4MMForCausalLM",
        "SmolVLMForConditionalGeneration",
        "WhisperForConditionalGeneration",
        "Zamba2ForCausalLM",
    }
)


def refusal(inventory: Inventory, recipe: Recipe, ranks: int, stages: int) -> str | None:
    """Why not, with the number that breaks it; None where it is legal. ranks: tensor-parallel size; stages: pipeline-parallel size.

    Raises CheckpointError where the recipe cannot be.
    """
    return next(_refusals(inventory, recipe, ranks, stages), None)


def _refusals(inventory: Inventory, recipe: Recipe, ranks: int, stages: int) -> Iterator[str]:
    shape = inventory.shape
    if stages > shape.layers:
        yield f"{shape.layers} layers are fewer than {stages} stages"
    if stages > 1 and shape.architecture in WITHOUT_PIPELINES:
        yield f"vLLM runs no {shape.architecture} in {stages} stages"
    yield from _heads(shape, ranks)
    yield from uneven_groups(inventory, recipe)
    if ranks > 1:
        yield from _widths(inventory, recipe, ranks)


def uneven_groups(inventory: Inventory, recipe: Recipe) -> Iterator[str]:
    """The columns that share a scale must divide a weight's, on one rank too (workers/stream/formats/base.py, Quantizer.check)."""
    for one in inventory.alike(recipe)[0]:
        if one.form is None or one.form.group is None:
            continue
        columns = sides(one.part.tensor, inventory.shape)[1]
        if columns % one.form.group:
            fits = fitting(one.form.group, columns)
            yield f"{columns} columns of {one.part.tensor.name} are no whole groups of {one.form.group}: {fits} would fit"


def _heads(shape: Shape, ranks: int) -> Iterator[str]:
    """vllm/config/model.py, verify_with_parallel_config; vllm/distributed/utils.py, divide."""
    if shape.heads % ranks:
        yield f"{shape.heads} attention heads do not divide by {ranks} ranks"
    if max(shape.kv_heads, ranks) % min(shape.kv_heads, ranks):
        yield f"{shape.kv_heads} KV heads and {ranks} ranks: neither divides by the other"
    for state in dict.fromkeys(one for one in (*shape.mixers, *shape.beside) if isinstance(one, State)):
        if state.heads % ranks:
            yield f"{state.heads} heads of linear attention do not divide by {ranks} ranks"
        if state.key_heads % ranks:
            yield f"{state.key_heads} key heads of linear attention do not divide by {ranks} ranks"
        if state.groups > 1 and state.groups % ranks:
            yield f"{state.groups} groups of Mamba-2 do not divide by {ranks} ranks"


def _widths(inventory: Inventory, recipe: Recipe, ranks: int) -> Iterator[str]:
    """What is cut across a side needs a multiple of the ranks there, and no group or block with one scale may be cut."""
    source = inventory.checkpoint.quantization
    for one in inventory.alike(recipe)[0]:
        if one.part.split != "whole" and one.part.kind not in ("vision", "state_space") and len(one.part.tensor.shape) in (2, 3):
            yield from _width(one.part, one.form, source, inventory.shape, ranks)


def _width(part: Part, form: Format | None, source: SourceQuantization | None, shape: Shape, ranks: int) -> Iterator[str]:
    name, (rows, columns), ways = part.tensor.name, sides(part.tensor, shape), part.ways(ranks)
    if part.split == "vocabulary":
        if padded_vocabulary(rows) % ranks:
            yield f"{padded_vocabulary(rows)} rows of {name} (with padding) do not divide by {ranks} ranks"
        return
    across, called = (columns, "columns") if part.split == "row" else (rows, "rows")
    if part.kind == "scale":
        # Each is for a group of columns. gpt-oss is the exception: its kernels pad what a cut leaves over.
        if part.split == "row" and columns % ways and (source is None or source.method not in ("mxfp4", "fp8_block")):
            yield f"{columns} groups of columns in {name} do not divide by {ranks} ranks"
        return
    if across % ways:
        yield f"{across} {called} of {name} do not divide by {ranks} ranks"
    elif (unit := _unit(part, form, source)) and across // ways % unit:
        yield f"{across} {called} of {name} over {ranks} ranks are no whole groups of {unit}"


def _unit(part: Part, form: Format | None, source: SourceQuantization | None) -> int | None:
    """How many rows or columns, whichever are cut, belong together."""
    if form is None:
        blocked = source is not None and source.method == "fp8_block" and part.tensor.dtype.startswith("F8")
    else:
        blocked = form.name == "fp8_block"
    if blocked:
        return BLOCK
    return form.group if form is not None and part.split == "row" else None
