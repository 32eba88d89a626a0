from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from workers.vllm.kv.prompt_logprobs import ROWS, bound, rehearse
from workers.vllm.symbols import TABLE

VOCABULARY, WIDTH = 50, 8


class Gathered(NamedTuple):
    """As vLLM's LogprobsTensors."""

    ids: torch.Tensor
    scores: torch.Tensor
    ranks: torch.Tensor
    counts: list[int] | None = None


class Model:
    def __init__(self) -> None:
        self.head = torch.randn(WIDTH, VOCABULARY, generator=torch.Generator().manual_seed(1))
        self.rows: list[int] = []

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows.append(hidden.shape[0])
        return hidden @ self.head


class Sampler:
    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1)

    def gather_logprobs(self, scores: torch.Tensor, most: int, ids: torch.Tensor) -> Gathered:
        top = scores.topk(most)
        own = scores.gather(-1, ids.unsqueeze(-1))
        return Gathered(top.indices, top.values, (scores > own).sum(-1))


class Runner:
    """The part of vLLM's V1 runner that this is about."""

    def __init__(self, mode: str = "raw_logprobs") -> None:
        self.model, self.sampler, self.mode = Model(), Sampler(), mode

    def _get_prompt_logprobs_dict(self, hidden: torch.Tensor, ids: torch.Tensor) -> Gathered:
        logits = self.model.compute_logits(hidden)
        scores = logits.to(torch.float32) if self.mode == "raw_logits" else self.sampler.compute_logprobs(logits)
        return self.sampler.gather_logprobs(scores, 5, ids)


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits"])
@pytest.mark.parametrize("count", [1, ROWS, 3 * ROWS + 7])
def test_few_rows_at_a_time_and_the_same_answer(mode: str, count: int) -> None:
    hidden, ids = torch.randn(count, WIDTH), torch.randint(VOCABULARY, (count,))
    want = Runner(mode)._get_prompt_logprobs_dict(hidden, ids)
    runner = Runner(mode)
    model, sampler = runner.model, runner.sampler
    bound(runner)
    got = runner._get_prompt_logprobs_dict(hidden, ids)
    assert isinstance(got, Gathered)
    assert torch.equal(got.ids, want.ids)
    assert torch.allclose(got.scores, want.scores, atol=1e-5)
    assert torch.equal(got.ranks, want.ranks)
    assert (max(model.rows), sum(model.rows)) == (min(count, ROWS), count)
    assert (runner.model, runner.sampler) == (model, sampler)


def test_model_and_sampler_are_back_after_an_error() -> None:
    runner = Runner()
    model = runner.model
    bound(runner)
    with pytest.raises(RuntimeError):
        runner._get_prompt_logprobs_dict(torch.randn(3, WIDTH + 1), torch.zeros(3, dtype=torch.int64))
    assert runner.model is model


def test_the_second_runners_function_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def stock(ids: torch.Tensor, hidden: torch.Tensor, most: int, mode: str = "raw") -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(ids.shape[0])
        return ids, hidden * most

    (home,) = TABLE["compute_prompt_logprobs_with_chunking"].homes
    module, stock.__module__ = ModuleType(home), home
    module.compute_prompt_logprobs_with_chunking = stock  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, home, module)
    bound(SimpleNamespace())
    bound(SimpleNamespace())
    ids, hidden = torch.arange(2 * ROWS + 1), torch.randn(2 * ROWS + 1, WIDTH)
    found = module.compute_prompt_logprobs_with_chunking(ids, hidden, 2, mode="raw")
    assert asked == [ROWS, ROWS, 1]
    assert torch.equal(found[0], ids)
    assert torch.equal(found[1], hidden * 2)


def test_a_release_that_has_it_elsewhere_is_said_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (home,) = TABLE["compute_prompt_logprobs_with_chunking"].homes
    monkeypatch.setitem(sys.modules, home, None)
    bound(SimpleNamespace())
    assert "log-probabilities" in caplog.text


def test_a_rehearsal_takes_as_many_rows_as_there_will_be() -> None:
    runner = Runner()
    rehearse(runner, torch.randn(3 * ROWS, WIDTH))
    rehearse(runner, SimpleNamespace())  # not the last stage of a pipeline
    assert runner.model.rows == [ROWS]
