"""What a plan for one rank is beside vLLM's own answer about the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from sparkd.capacity.kv_cache import Serving
from sparkd.capacity.plan_for_checkpoint import answer as planned
from sparkd.capacity.plan_request import PlanRequest
from sparkd.capacity.vllm_figures import EXACT, GUESS, exact_of
from sparkd.checkpoint import MODELOPT, Checkpoint, TensorRef
from sparkd.checkpoint.header import DTYPE_BITS
from sparkd.checkpoint.quantization import source_quantization
from sparkd.errors import CheckpointError, ConfigError
from sparkd.hardware import SPARK as SPARK_MACHINE
from sparkd.inquiry.model_answers import ModelAnswer

# What becomes of a plan: RIGHT as vLLM counts; MARKED: it says that it guesses, and how much at most; UNKNOWN: that it does not know.
RIGHT, WRONG, MARKED, UNKNOWN, REFUSED = "right", "wrong", "guess", "unknown", "refused"
# Where every model fits, so that the longest request is planned.
_ROOMY = replace(SPARK_MACHINE, memory_bytes=1 << 50)
_DTYPES = {
    "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0", "uint8": "U8", "int8": "I8", "int32": "I32", "int64": "I64", "bool": "BOOL",
}  # fmt: skip


def judged(
    files: Mapping[str, bytes], answer: ModelAnswer, tensors: Mapping[str, TensorRef] | None = None, *, asked: bool
) -> tuple[str, str]:
    """What a plan for one rank is beside vLLM's answer, and its numbers in short. files: as a ModelQuestion has them. tensors: of its
    checkpoint, None for vLLM's own parameters. asked: whether the plan gets that answer."""
    try:
        plan = _plan(files, answer, _stored(answer) if tensors is None else tensors, asked=asked)
    except CheckpointError as error:
        return UNKNOWN if not asked and "vLLM has computed" in error.message else REFUSED, error.message
    except ConfigError as error:
        return REFUSED, error.message
    option = plan["options"][0]
    found = option["footprint"]
    if found is None:
        return REFUSED, str(option["reason"])
    (stage,) = answer.stages
    tokens, size = stage.requests[-1] if stage.requests else (option["max_model_len"], 0)
    near = option["max_model_len"] == tokens and abs(found["kv_bytes_per_request"] - size) <= (0 if asked else stage.block_bytes)
    weights = stage.parameter_bytes + stage.buffer_bytes
    near = near and abs(found["weights"] - weights) <= (0 if asked else 0.005 * weights)
    numbers = f"{option['max_model_len']} tokens in {found['kv_bytes_per_request']} B (+ {found['upper']}), vLLM {tokens} in {size}"
    numbers += f"; weights {found['weights'] / weights - 1:+.1%}" if weights else ""
    if asked:
        return RIGHT if near and found["sureness"] == EXACT else WRONG, numbers
    if found["sureness"] != GUESS:
        return RIGHT if near else WRONG, numbers
    return MARKED if _bounds(answer, option, weights) else WRONG, numbers


def _bounds(answer: ModelAnswer, option: Mapping[str, Any], weights: int) -> bool:
    """Whether the most that a guess says is no less than vLLM's own sizes at the plan's length."""
    found, facts = option["footprint"], answer.facts
    serving = Serving(1, max_num_seqs=facts["max_num_seqs"], max_num_batched_tokens=facts["max_num_batched_tokens"])
    exact = exact_of(answer, serving, same_format=True)
    if exact is None or exact.layout is None:
        return True
    cost = exact.layout.cost(option["max_model_len"])
    return cost.least <= found["kv"] + found["upper_kv"] and weights + cost.least <= found["weights"] + found["kv"] + found["upper"]


def _plan(files: Mapping[str, bytes], answer: ModelAnswer, tensors: Mapping[str, TensorRef], *, asked: bool) -> dict[str, Any]:
    name = next(name for name in ("config.json", "params.json") if name in files)
    config, apart = json.loads(files[name]), json.loads(files[MODELOPT]) if MODELOPT in files else None
    checkpoint = Checkpoint("/nowhere", config, (), tensors, source_quantization(config, apart, tensors), name)
    facts = answer.facts
    question = PlanRequest(
        "nobody/model", quantize="bf16", max_num_seqs=facts["max_num_seqs"], max_num_batched_tokens=facts["max_num_batched_tokens"]
    )
    return planned(
        question, _ROOMY, lambda source: (source, checkpoint, None), ask=lambda questions: [answer if asked else None for _ in questions]
    )


def _stored(answer: ModelAnswer) -> dict[str, TensorRef]:
    """A checkpoint with vLLM's own parameters: the formulas get no hint of its layers but the numbers in their names."""
    rows = [one for one in answer.stages[0].parameters if one.purpose == "model" and one.dtype in _DTYPES]
    found = {}
    for row in rows:
        dtype = _DTYPES[row.dtype]
        found[row.name] = TensorRef(row.name, dtype, row.shape, "/nowhere/model.safetensors", 0, prod(row.shape) * DTYPE_BITS[dtype] // 8)
    return found
