"""One engine that is sized by the worker class under test, as a program: JSON on stdin, one JSON line on stdout.

    {"model": FOLDER, "requests": N}  ->  {"prompts": [tokens], "preempted": N, "answer": TEXT}

In a session of its own (tests/support/given_memory.py). The worst load that it admits: twice as many prompts of the longest length as may
run together.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.support.given_memory import install

MAX_MODEL_LEN, MAX_NUM_SEQS = 128, 3


def main() -> None:
    case: dict[str, Any] = json.load(sys.stdin)
    install()
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        case["model"],
        worker_cls="workers.kv.SparkCPUWorker",
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=128,
        dtype="float32",  # several times as fast as bfloat16 on a CPU without AMX
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    longest = [TokensPrompt(prompt_token_ids=[5 + number] * (MAX_MODEL_LEN - 2)) for number in range(case["requests"])]
    done = llm.generate(longest, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = llm.chat(question, SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].text
    preempted = sum(one.value for one in llm.get_metrics() if one.name == "vllm:num_preemptions")
    values = {"prompts": [len(one.prompt_token_ids) for one in done], "preempted": preempted, "answer": answer}
    print(f"\nkv_case {json.dumps(values)}", flush=True)


if __name__ == "__main__":
    main()
