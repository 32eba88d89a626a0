"""Owns the schema of another node's answer about a model: names, types and sizes, checked before any of it is used or kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from sparkd.errors import EngineError

# The largest answers about vLLM's own models have some megabytes: tens of thousands of parameters.
MOST_BYTES = 64 << 20
_Name = Annotated[str, Field(max_length=1000)]
_Text = Annotated[str, Field(max_length=100_000)]
_Size = Annotated[int, Field(ge=0, lt=1 << 60)]
_Shape = Annotated[list[_Size], Field(max_length=16)]
_Rows = Annotated[list[tuple[Literal["model", "draft"], _Name, _Shape, _Name]], Field(max_length=1 << 18)]
_Fact = _Text | _Size | bool | None | Annotated[list[_Name], Field(max_length=256)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Refusal(_Strict):
    step: Literal["arguments", "config", "model", "cache", "sizes", "deadline", "memory", "died"]
    type: _Name
    message: _Text
    certain: bool


class _Layer(_Strict):
    name: _Name
    spec: _Name
    block: _Size
    page_bytes: _Size
    token_bytes: Annotated[float, Field(ge=0)] = 0.0
    state_bytes: _Size = 0
    window: _Size | None = None
    chunk: _Size | None = None


class _Stage(_Strict):
    rank: _Size
    layers: Annotated[list[_Layer], Field(max_length=1 << 14)]
    parameters: _Rows
    parameter_bytes: _Size
    buffer_bytes: _Size


class _Group(_Strict):
    spec: _Name
    block: Annotated[_Size, Field(gt=0)]
    page_bytes: _Size
    layers: list[_Name]


class _Pool(_Strict):
    block_bytes: _Size
    requests: Annotated[list[tuple[_Size, _Size]], Field(max_length=256)]


class _Cache(_Strict):
    groups: list[_Group]
    stages: list[_Pool]


class _Answer(BaseModel):
    """An answer. Keys that are not named here are facts: see sparkd.inquiry.model_answers.ModelAnswer."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    __pydantic_extra__: dict[str, _Fact]

    vllm: _Name
    platform: _Name
    stand_in: bool
    seconds: Annotated[float, Field(ge=0)]
    refusal: _Refusal | None
    stages: Annotated[list[_Stage], Field(max_length=64)]
    cache: _Cache | None


_OBJECT: TypeAdapter[_Answer] = TypeAdapter(_Answer)


def checked(text: str, node: str) -> dict[str, Any]:
    """Parse an answer. Raises EngineError with the name of the wrong field for text that is no answer."""
    if len(text) > MOST_BYTES:
        raise EngineError(f"The agent of node {node} gave an answer about a model of {len(text):,} bytes; {MOST_BYTES:,} are read at most.")
    try:
        answer = _OBJECT.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise EngineError(f"The agent of node {node} gave an invalid answer about a model: {where[:200]}: {first['msg']}.") from None
    stages = answer.cache.stages if answer.cache is not None else answer.stages
    if len(stages) != len(answer.stages):
        raise EngineError(f"The agent of node {node} gave an invalid answer about a model: cache.stages are not its stages.")
    whole: Mapping[str, Any] = json.loads(text)
    return dict(whole)
