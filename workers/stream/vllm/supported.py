"""Refuses formats for which this vLLM has no kernel or no parameter, before a load. Never reads a weight.

Importing this module imports no vLLM; a check does, and raises MissingSymbol where a release lacks a symbol. vLLM 0.26 takes gpt-oss's
experts a layer at a time and only in the MXFP4 that OpenAI published. From 0.32 on its class lists the parts that it takes one expert at a
time (models/gpt_oss.py, _get_streamed_expert_info), and on a GPU only the integer method of compressed-tensors has parameters for their
biases.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from sparkd.checkpoint import Checkpoint
from sparkd.errors import CheckpointError
from workers.quantization.formats import Format
from workers.quantization.packed import is_interleaved, packed_of
from workers.stream.vllm.symbols import symbol

BLOCK = 128
_UP = re.compile(r"(.+\.experts\.\d+)\.up_proj")

_EXPERTS = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"
_KEEP = "add 'experts' to `keep`"


def refuse_unserved(checkpoint: Checkpoint, formats: Mapping[str, Format], tensor_parallel_size: int) -> None:
    """Raises CheckpointError for the first matrix or set of experts whose format vLLM could not take."""
    _refuse_torn_blocks(checkpoint, formats)
    _refuse_experts_without_gate(checkpoint, formats)
    wanted: dict[Format, str] = {}
    for module, form in formats.items():
        packed = packed_of(module)
        if packed is not None and not form.keeps and is_interleaved(checkpoint, packed.experts):
            wanted.setdefault(form, module)
    for form, module in wanted.items():
        if (problem := _unserved(form, tensor_parallel_size)) is not None:
            raise CheckpointError(problem[0], file=checkpoint.tensors[module].path, tensor=module, cure=problem[1])


def _refuse_torn_blocks(checkpoint: Checkpoint, formats: Mapping[str, Format]) -> None:
    """vLLM's kernels for FP8 in blocks cut the activations into groups of 128 (per_token_group_quant_fp8); its CPU has another way."""
    for module, form in formats.items():
        ref = checkpoint.tensors.get(f"{module}.weight")
        if form.spelling == "fp8-block" and ref is not None and len(ref.shape) == 2 and ref.shape[1] % BLOCK and not _is_cpu():
            raise CheckpointError(
                f"K={ref.shape[1]} is not divisible by {BLOCK}, and vLLM's fp8-block kernels on a GPU need that",
                file=ref.path,
                tensor=ref.name,
                cure="Use fp8, or give that layer another format",
            )


def _refuse_experts_without_gate(checkpoint: Checkpoint, formats: Mapping[str, Format]) -> None:
    """vLLM 0.26's experts in MXFP4 always have room for a gate beside the up projection, and its kernel then finds half of them empty."""
    for module, form in formats.items():
        match = _UP.fullmatch(module) if form.name == "mxfp4" else None
        if match is None or f"{match[1]}.gate_proj.weight" in checkpoint.tensors:
            continue
        if not _is_cpu() and not _mxfp4_counts_projections():
            raise CheckpointError(
                "this vLLM's mxfp4 experts need a gate projection on a GPU, and this model's have none",
                file=checkpoint.tensors[f"{module}.weight"].path,
                tensor=f"{module}.weight",
                cure="Give the experts another format with `layers: {experts: nvfp4}`, or use vLLM 0.32 or later",
            )
        return


def _unserved(form: Format, tensor_parallel_size: int) -> tuple[str, str] | None:
    """(reason, cure), or None where this vLLM takes the format."""
    taken = _taken()
    if not taken:
        return (
            f"this vLLM takes gpt-oss's experts quantized only as OpenAI published them (MXFP4), not in {form.spelling} made here",
            f"Load the published checkpoint, use vLLM 0.32 or later, or {_KEEP}",
        )
    if form.weight_name == "nvfp4" and "w13_weight_global_scale" not in taken:
        return (
            "vLLM's gpt-oss has no place for the second scale of nvfp4 experts",
            f"Give them another format with `layers: {{experts: mxfp4}}`, or {_KEEP}",
        )
    if _is_cpu():
        if form.name == "fp8" and tensor_parallel_size > 1:
            return (
                "vLLM's gpt-oss cuts the scale of fp8 experts between tensor-parallel ranks, though each needs the whole",
                f"Give them another format with `layers: {{experts: fp8-block}}`, or {_KEEP}",
            )
        return None
    if form.name != "int4" or not _int4_has_biases():
        other = "int4-g32" if form.name != "int4" and _int4_has_biases() else "OpenAI's published MXFP4 checkpoint"
        return (f"this vLLM's {form.spelling} experts have no biases on a GPU, and gpt-oss's do", f"Use {other}, or {_KEEP}")
    return None


def _taken() -> frozenset[str]:
    """The parts that vLLM's gpt-oss takes one expert at a time; empty for releases that cannot."""
    return frozenset(symbol("vllm.model_executor.models.gpt_oss", "__dict__").get("_GPT_OSS_STREAMED_EXPERT_SUFFIX_TO_SHARD", ()))


def _is_cpu() -> bool:
    return bool(symbol("vllm.platforms", "current_platform").is_cpu())


def _mxfp4_counts_projections() -> bool:
    return "w13_num_shards" in _names_in("w4a4_mxfp4", "CompressedTensorsW4A4Mxfp4MoEMethod")


def _int4_has_biases() -> bool:
    return "has_bias" in _names_in("wna16", "CompressedTensorsWNA16MoEMethod")


def _names_in(module: str, method: str) -> tuple[str, ...]:
    """The names that the `create_weights` of one of compressed-tensors' methods for experts mentions."""
    names: tuple[str, ...] = symbol(f"{_EXPERTS}.compressed_tensors_moe_{module}", f"{method}.create_weights.__code__.co_names")
    return names
