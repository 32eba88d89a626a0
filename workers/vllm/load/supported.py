"""Refuses formats for which this vLLM has no kernel or no parameter, before a load. Never reads a weight.

Importing this module imports no vLLM; a check does, and raises MissingSymbol. vLLM's gpt-oss takes some parts of its experts one at a time
(models/gpt_oss.py, _get_streamed_expert_info), and on a GPU only the integer method of compressed-tensors has parameters for their biases.
"""

from __future__ import annotations

from collections.abc import Mapping

from sparkd.checkpoint import Checkpoint
from sparkd.errors import CheckpointError
from workers.quantization.formats import Format
from workers.quantization.packed import is_interleaved, packed_of
from workers.vllm.symbols import symbol

BLOCK = 128
_KEEP = "add 'experts' to `keep`"


def refuse_unserved(checkpoint: Checkpoint, formats: Mapping[str, Format], tensor_parallel_size: int) -> None:
    """Raises CheckpointError for the first matrix or set of experts whose format vLLM could not take."""
    _refuse_torn_blocks(checkpoint, formats)
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


def _unserved(form: Format, tensor_parallel_size: int) -> tuple[str, str] | None:
    """(reason, cure), or None where this vLLM takes the format."""
    if form.weight_name == "nvfp4" and "w13_weight_global_scale" not in symbol("gpt_oss_streamed"):
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
    if form.name != "int4":
        return (f"vLLM's {form.spelling} experts have no biases on a GPU, and gpt-oss's do", f"Use int4-g32, or {_KEEP}")
    return None


def _is_cpu() -> bool:
    return bool(symbol("current_platform").is_cpu())
