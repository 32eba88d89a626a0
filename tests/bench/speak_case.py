"""The child that lets an engine answer prompts and say how likely it found their tokens. Never compares two engines.

Standard input: {"model", "arguments", "prompts": lists of token ids or texts, "chat": text or null, "max_tokens", "logprobs": how many
tokens of each prompt position; -1 for the whole vocabulary}.
Answer: {"prompts": [{"ids", "likely": one {token id: log-probability} for each position but the first, "tokens"}], "chat", "seconds"}.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from tests.bench import child


def main() -> None:
    question = json.load(sys.stdin)
    from vllm import LLM, SamplingParams

    started = time.perf_counter()
    logprobs = question["logprobs"]
    tokenized = question.get("chat") is None and not any(isinstance(prompt, str) for prompt in question["prompts"])
    engine = LLM(question["model"], skip_tokenizer_init=tokenized, max_logprobs=logprobs, **question["arguments"])
    answer: dict[str, Any] = {"prompts": []}
    # Without detokenize=False every one of the log-probabilities is spelled out, which takes longer than the model.
    params = SamplingParams(temperature=0, max_tokens=question["max_tokens"], ignore_eos=True, prompt_logprobs=logprobs, detokenize=False)
    for prompt in question["prompts"]:
        given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        (made,) = engine.generate([given], params, use_tqdm=False)
        likely = [{token: one.logprob for token, one in position.items()} for position in (made.prompt_logprobs or [])[1:]]
        answer["prompts"].append({"ids": list(made.prompt_token_ids), "likely": likely, "tokens": list(made.outputs[0].token_ids)})
    if question.get("chat"):
        spoken = engine.chat([{"role": "user", "content": question["chat"]}], SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
        answer["chat"] = spoken[0].outputs[0].text
    child.say({**answer, "seconds": time.perf_counter() - started})


if __name__ == "__main__":
    main()
