"""Defines a question about a model and vLLM's answer to it, as workers.vllm.ask.model_answer writes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkd.checkpoint import Checkpoint
from sparkd.checkpoint.tensors import TensorRef

OWN = "own"
SPARK = "cuda:12.1"


@dataclass(frozen=True, slots=True)
class ModelQuestion:
    """A question about a model.

    folder: the checkpoint's folder.
    files: without a folder, the texts of FILES by name.
    tensors: the headers of its weights, which sparkd's load format and some quantization methods read.
    args, env: the engine's flags and variables at its start.
    platform: OWN for the runtime's own, SPARK for a Spark's GPU, which a runtime without CUDA imitates.
    draft: the headers of a draft that is not on this disk, whose model is DRAFT in args.
    """

    folder: Path | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    tensors: Collection[TensorRef] = ()
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    platform: str = OWN
    draft: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class ModelRefusal:
    """Why there is no model.

    step: the one at which vLLM failed: `arguments`, `config`, `model`, `cache` (the layers' KV cache), `sizes` (bytes of requests in it),
    `deadline`, `memory` or `died`.
    certain: vLLM refuses to serve this model; otherwise this machine may only be unable to build it, and nothing is known about the model.
    """

    step: str
    type: str
    message: str
    certain: bool


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one layer on one rank.

    spec: vLLM's class.
    token_bytes: of each token, up to `window` or `chunk` tokens where one is set.
    state_bytes: of a request of any length; page_bytes: the same with padding.
    """

    name: str
    spec: str
    block: int
    page_bytes: int
    token_bytes: float = 0.0
    state_bytes: int = 0
    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter of one rank, for `model` or `draft`. dtype: torch's name."""

    purpose: str
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage, as each of its tensor-parallel ranks has it.

    block_bytes: of a block of the pool in all its layers, 0 where unknown.
    requests: (tokens, bytes of one request of that length), the longest request last.
    """

    layers: tuple[LayerCache, ...]
    parameters: tuple[Tensor, ...]
    parameter_bytes: int
    buffer_bytes: int
    block_bytes: int = 0
    requests: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """vLLM's answer about a model.

    platform: `cpu` or `cuda:12.1`.
    stand_in: whether the child imitated that platform.
    facts: the other fields of workers.vllm.ask.model_answer, up to the step that failed (`max_model_len`, `cache_dtype`, `layers`, ..).
    groups: the groups of vLLM's block pool, as JSON.
    """

    vllm: str
    platform: str
    stand_in: bool
    seconds: float
    refusal: ModelRefusal | None
    stages: tuple[Stage, ...]
    facts: Mapping[str, Any]
    groups: tuple[Mapping[str, Any], ...] = ()


def answer_of(raw: Mapping[str, Any]) -> ModelAnswer:
    """The answer in this JSON."""
    pool = raw["cache"] or {"groups": [], "stages": [{}] * len(raw["stages"])}
    fields = {"vllm", "platform", "stand_in", "seconds", "refusal", "stages", "cache"}
    return ModelAnswer(
        vllm=raw["vllm"],
        platform=raw["platform"],
        stand_in=raw["stand_in"],
        seconds=raw["seconds"],
        refusal=ModelRefusal(**raw["refusal"]) if raw["refusal"] else None,
        stages=tuple(_stage(stage, own) for stage, own in zip(raw["stages"], pool["stages"], strict=True)),
        facts={name: value for name, value in raw.items() if name not in fields},
        groups=tuple(pool["groups"]),
    )


def _stage(raw: Mapping[str, Any], pool: Mapping[str, Any]) -> Stage:
    return Stage(
        layers=tuple(LayerCache(**layer) for layer in raw["layers"]),
        parameters=tuple(Tensor(purpose, name, tuple(shape), dtype) for purpose, name, shape, dtype in raw["parameters"]),
        parameter_bytes=raw["parameter_bytes"],
        buffer_bytes=raw["buffer_bytes"],
        block_bytes=pool.get("block_bytes", 0),
        requests=tuple((tokens, size) for tokens, size in pool.get("requests", ())),
    )
