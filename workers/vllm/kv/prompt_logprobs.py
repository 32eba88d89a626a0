"""Makes vLLM compute the log-probabilities of a prompt's own tokens a few rows at a time. Never changes the values.

For a request with `prompt_logprobs`, or `echo` with `logprobs`, vLLM's V1 runner holds the logits of a whole chunk of the prompt in memory,
with a float32 copy: 12 GB for 8,192 tokens of a vocabulary of 152,000. Its V2 runner takes 1,024 rows at a time, 1.5 GB. Reserving that for
a rare request would waste memory. So the runner gets few rows at a time: as many as the rehearsal tries.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from sparkd.errors import MissingSymbol
from workers.vllm.symbols import symbol

logger = logging.getLogger("vllm.sparkd.kv")

ROWS = 128
MOST = 20  # vLLM's default --max-logprobs
_V1, _V2 = "_get_prompt_logprobs_dict", "compute_prompt_logprobs_with_chunking"


def bound(runner: Any) -> None:
    """Apply this to the runner, or to every V2 runner of this process. A release that has the function elsewhere is noted in the log."""
    stock = getattr(runner, _V1, None)
    if stock is not None:
        runner._get_prompt_logprobs_dict = _with_pieces(runner, stock)
        return
    try:
        function = symbol(_V2)
    except MissingSymbol:
        logger.warning("sparkd: this vLLM computes the log-probabilities of prompts elsewhere: they may need memory that is not there.")
        return
    if not hasattr(function, "sparkd_stock"):
        setattr(sys.modules[function.__module__], _V2, rows_at_a_time(function))


def rehearse(runner: Any, hidden: Any) -> None:
    """Run one step, so that its memory is measured. hidden: hidden states [tokens, hidden size] of a forward pass; another type means that
    this rank is not the last stage of a pipeline, and nothing runs."""
    if not isinstance(hidden, torch.Tensor):
        return
    logits = runner.model.compute_logits(hidden[:ROWS])
    if logits is not None:
        logits.float().log_softmax(-1).topk(min(MOST, logits.shape[-1]))


def rows_at_a_time(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of ids [rows], hidden states [rows, ..] and more, which returns a tuple of tensors [rows, ..]: ROWS rows a call."""

    def pieces(ids: torch.Tensor, hidden: torch.Tensor, *more: Any, **named: Any) -> Any:
        starts = range(0, max(1, ids.shape[0]), ROWS)
        return _joined([stock(ids[at : at + ROWS], hidden[at : at + ROWS], *more, **named) for at in starts])

    pieces.sparkd_stock = stock  # type: ignore[attr-defined]
    return pieces


def _with_pieces(runner: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's own method, called with stand-ins for model and sampler that compute nothing before rows are gathered."""

    def bounded(*args: Any, **kwargs: Any) -> Any:
        model, sampler = runner.model, runner.sampler
        later = _Later(model, sampler)
        runner.model = runner.sampler = later
        try:
            return stock(*args, **kwargs)
        finally:
            runner.model, runner.sampler = model, sampler

    return bounded


class _Rows:
    """Logits [rows, vocabulary] that are not computed yet. log: stands for their log-probabilities."""

    def __init__(self, hidden: torch.Tensor, *, log: bool = False) -> None:
        self.hidden = hidden
        self.log = log

    def to(self, _dtype: torch.dtype) -> _Rows:
        return self


class _Later:
    """Stands for a model and its sampler."""

    def __init__(self, model: Any, sampler: Any) -> None:
        self._model = model
        self._sampler = sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def compute_logits(self, hidden: torch.Tensor) -> _Rows:
        return _Rows(hidden)

    def compute_logprobs(self, rows: _Rows) -> _Rows:
        return _Rows(rows.hidden, log=True)

    def gather_logprobs(self, rows: _Rows, most: int, ids: torch.Tensor) -> Any:
        def piece(ids: torch.Tensor, hidden: torch.Tensor) -> Any:
            logits = self._model.compute_logits(hidden)
            scores = self._sampler.compute_logprobs(logits) if rows.log else logits.to(torch.float32)
            return self._sampler.gather_logprobs(scores, most, ids)

        return rows_at_a_time(piece)(ids, rows.hidden)


def _joined(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    fields = [torch.cat(column) if isinstance(column[0], torch.Tensor) else column[0] for column in zip(*parts, strict=True)]
    kind = type(parts[0])
    return kind(*fields) if hasattr(kind, "_fields") else kind(fields)
