"""That a plan of a model without a formula is vLLM's own where vLLM is asked, and otherwise says that it guesses or does not know.

Real vLLM answers, on the meta device, as for a Spark.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from sparkd.capacity.kv_cache import Serving
from sparkd.capacity.vllm_figures import exact_of
from sparkd.inquiry.model_answers import ModelAnswer, ModelQuestion
from tests.conftest import VllmAnswers
from tests.support.plan_verdicts import MARKED, RIGHT, UNKNOWN, judged
from tests.support.rare_configs import RARE, REFUSED, UNANSWERED, question_of


def questions(_folder: Path) -> dict[str, ModelQuestion]:
    return {name: question_of(name) for name in RARE}


@pytest.fixture(scope="module")
def answers(vllm_answers: VllmAnswers) -> Mapping[str, ModelAnswer | None]:
    return vllm_answers.answers[__name__]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RARE)
def test_a_plan_is_vllms_or_says_that_it_is_not(answers: Mapping[str, ModelAnswer | None], name: str) -> None:
    answer = answers[name]
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
