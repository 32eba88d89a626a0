"""The answer of vLLM about one model that the disk has."""

from __future__ import annotations

from sparkd.vllm.ask.answers import ModelAnswer, ModelQuestion
from sparkd.vllm.ask.model import InquiryRuntime, kept_answers


def kept(question: ModelQuestion, runtime: InquiryRuntime) -> ModelAnswer | None:
    (answer,) = kept_answers([question], runtime)
    return answer
