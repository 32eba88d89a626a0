"""The question that a plan answers, the same for the command line, the admin API, the page and a bench."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sparkd.units import MOST

MODEL_CHARACTERS = 4096
KvDtype = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]


class PlanRequest(BaseModel):
    """The options of one plan; each that is not None overrides the model's entry.

    model: a configured name, a recipe, a folder or a hub id.
    nodes: how many there are.
    max_model_len: tokens of one request.
    requests: of that length at once.
    quantize: a format, a mapping of formats, `auto` or `best`.
    hardware: of the daemon's plan; `node` is its own machine.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1, max_length=MODEL_CHARACTERS)
    nodes: int | None = Field(default=None, ge=1, le=MOST["nodes"])
    max_model_len: int | None = Field(default=None, ge=1, le=MOST["max_model_len"])
    requests: int | None = Field(default=None, ge=1, le=MOST["requests"])
    quantize: str | dict[str, Any] | None = None
    max_num_batched_tokens: int | None = Field(default=None, ge=1, le=MOST["max_num_batched_tokens"])
    max_num_seqs: int | None = Field(default=None, ge=1, le=MOST["max_num_seqs"])
    kv_cache_dtype: KvDtype | None = None
    margin_gib: Annotated[float | None, Field(ge=0, le=MOST["margin_gib"])] = None
    speculative: Literal["off", "ngram", "suffix", "mtp", "dflash"] | None = None
    enforce_eager: bool | None = None
    hardware: Literal["node", "spark", "h200"] = "node"
