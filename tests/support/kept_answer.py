"""The answer of vLLM about one model that the disk has."""

from __future__ import annotations

from sparkd.inquiry.model_answers import InquiryRuntime, ModelAnswer, ModelQuestion, kept_answers


def kept(question: ModelQuestion, runtime: InquiryRuntime) -> ModelAnswer | None:
    (answer,) = kept_answers([question], runtime)
    return answer
