"""The child that lets an engine answer prompts and say how likely it found their tokens. Never compares two engines.

Standard input: {"model", "arguments", "read": prompts whose tokens are rated, "logprobs": how many tokens of each of their positions,
"greedy": prompts that are answered, "max_tokens": of each answer, "chat": a question}.
Answer: {"read": [{"ids", "likely": one {token id: log-probability} for each position but the first}], "greedy": tokens of each answer,
"chat"}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.bench import child


def main() -> None:
    question = json.load(sys.stdin)
    from vllm import LLM, SamplingParams

    logprobs = question["logprobs"]
    engine = LLM(question["model"], max_logprobs=logprobs, **question["arguments"])
    # Without detokenize=False every one of the log-probabilities is spelled out, which takes longer than the model.
    rating = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=logprobs, detokenize=False)
    answering = SamplingParams(temperature=0, max_tokens=question["max_tokens"], ignore_eos=True, detokenize=False)
    # All prompts at once: sparkd's kernels for a CPU decode each weight once a step.
    rated = engine.generate(question["read"], rating, use_tqdm=False)
    answered = engine.generate(question["greedy"], answering, use_tqdm=False)
    chat = [{"role": "user", "content": question["chat"]}]
    spoken = engine.chat(chat, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    child.say(
        {
            "read": [{"ids": list(made.prompt_token_ids), "likely": _likely(made)} for made in rated],
            "greedy": [list(made.outputs[0].token_ids) for made in answered],
            "chat": spoken[0].outputs[0].text,
        }
    )


def _likely(made: Any) -> list[dict[int, float]]:
    return [{token: one.logprob for token, one in position.items()} for position in made.prompt_logprobs[1:]]


if __name__ == "__main__":
    main()
