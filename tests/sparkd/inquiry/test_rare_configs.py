"""That a plan of a model without a formula is vLLM's own where vLLM is asked, and otherwise says that it guesses or does not know.

Real vLLM answers, on the meta device, as for a Spark: `make test` asks for one of each outcome, `make test-all` for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from sparkd.capacity.kv_cache import Serving
from sparkd.capacity.vllm_figures import exact_of
from sparkd.inquiry.model_answers import InquiryRuntime, ModelAnswer, ModelQuestion, ask
from tests.conftest import VllmAnswers
from tests.support.plan_verdicts import MARKED, RIGHT, UNKNOWN, judged
from tests.support.rare_configs import RARE, REFUSED, UNANSWERED, question_of

# One that vLLM answers where sparkd has no formula, one that nobody answers, one that vLLM refuses.
OUTCOMES = ("minicpm3", UNANSWERED[0], REFUSED[0])
OTHERS = [name for name in RARE if name not in OUTCOMES]
Answers = Mapping[str, ModelAnswer | None]


def questions(_folder: Path) -> dict[str, ModelQuestion]:
    return {name: question_of(name) for name in OUTCOMES}


@pytest.fixture(scope="module")
def answers(vllm_answers: VllmAnswers) -> Answers:
    return vllm_answers.answers[__name__]


@pytest.fixture(scope="module")
def other_answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    runtime = InquiryRuntime(None, [tmp_path_factory.mktemp("answers")])
    return dict(zip(OTHERS, ask([question_of(name) for name in OTHERS], runtime), strict=True))


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_plan_is_vllms_or_says_that_it_is_not(answers: Answers, name: str) -> None:
    check_plan(answers[name], name)


@pytest.mark.rest
@pytest.mark.parametrize("name", OTHERS)
def test_a_plan_of_the_others_is_vllms_or_says_that_it_is_not(other_answers: Answers, name: str) -> None:
    check_plan(other_answers[name], name)


def check_plan(answer: ModelAnswer | None, name: str) -> None:
    assert answer is not None
    if name in UNANSWERED + REFUSED:
        assert answer.refusal is not None and answer.refusal.certain == (name in REFUSED), answer.refusal
        exact = exact_of(answer, Serving(1), same_format=True)
        assert exact is None if name in UNANSWERED else exact is not None and exact.refusal
        return
    assert answer.refusal is None, answer.refusal
    exact_plan, formula = (judged(RARE[name], answer, asked=asked) for asked in (True, False))
    assert exact_plan[0] == RIGHT, exact_plan
    assert formula[0] in (MARKED, UNKNOWN), formula
