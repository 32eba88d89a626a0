"""Owns the question that a plan answers, the same for the command line and the admin API."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from sparkd.checkpoint import Checkpoint

MODEL_CHARACTERS = 4096
KvDtype = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]
# A user's name of a model -> (folder or hub id, headers, the PlannedEntry of a configured model or None).
Finder = Callable[[str], tuple[str, Checkpoint, Any]]
Others = Callable[[str, Checkpoint], Iterable[tuple[str, Checkpoint]]]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The options of one plan.

    model: a configured name, a folder or a hub id.
    max_model_len: None for the longest that fits. requests: of that length at once.
    quantize: a format or a recipe; None for the configured one, and for all formats without an entry.
    speculative: one of sparkd.capacity.speculative.METHODS.
    For a configured model each option that is not None overrides its entry. For another model, None is one node, one request, a cache of
    `auto` and CUDA graphs.
    """

    model: str
    nodes: int | None = None
    max_model_len: int | None = None
    requests: int | None = None
    quantize: str | dict[str, Any] | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    kv_cache_dtype: KvDtype | None = None
    margin_gib: float | None = None
    speculative: str | None = None
    enforce_eager: bool | None = None
