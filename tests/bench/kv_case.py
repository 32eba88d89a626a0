"""One engine start, measured, and the largest load that it admits. Never compares two engines, never sizes a cache.

Standard input: {"model", "arguments", "rounds", "new_tokens"}.
Answer: {"ready_at" (of the machine's monotonic clock), "engine_s", "tokens", "free_before", "free_ready", "idle_ready": reserved by torch's
allocator and in no use}, said when the engine is ready, and once more with {"free_lowest", "asked", "finished", "preempted", "load_s"} when
the load is done. A child without the second one did not survive.

A round is max_num_seqs prompts of the longest length that still leaves room for an answer. Every prompt begins with other tokens, so the
prefix cache spares nothing and in the end every block of the cache was written. Half of the requests ask for all that a sampler can do
(penalties, top-p, top-k, log-probabilities): each of them is a copy of the logits.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from tests.bench import child
from tests.bench.sampling import resident
from tests.support.given_memory import SIZE_BYTES, install

EVERY_S = 0.01
MOST_LOGPROBS = 20  # vLLM's default limit
FIRST_TOKEN = 300  # below are the special ones of tests/support/checkpoints.py


class Lowest:
    """The smallest value of `read` while the context is open, in `value`."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self.value = self._read()
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._thread.join()
        self.value = min(self.value, self._read())

    def _watch(self) -> None:
        while not self._ended.wait(EVERY_S):
            self.value = min(self.value, self._read())


def main() -> None:
    question = json.load(sys.stdin)
    import torch
    from vllm import LLM, SamplingParams

    cuda = torch.cuda.is_available()
    if not cuda:
        install()
    # The given machine has so much left: this process keeps what it holds.
    free = (lambda: int(torch.cuda.mem_get_info()[0])) if cuda else (lambda: SIZE_BYTES - own_bytes())
    free_before, began = free(), time.monotonic()
    engine = LLM(question["model"], skip_tokenizer_init=True, disable_log_stats=False, **question["arguments"])
    ready_at = time.monotonic()
    idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() if cuda else 0
    answer: dict[str, Any] = {"ready_at": ready_at, "engine_s": ready_at - began, "tokens": _tokens(engine)}
    answer |= {"free_before": free_before, "free_ready": free(), "idle_ready": idle}
    child.say(answer)
    if not question["rounds"]:
        return

    config = engine.llm_engine.vllm_config
    vocabulary = config.model_config.get_vocab_size()
    length = config.model_config.max_model_len - question["new_tokens"]
    together = config.scheduler_config.max_num_seqs
    drawn = random.Random(7)

    def prompt(number: int) -> dict[str, Any]:
        return {"prompt_token_ids": [number % vocabulary, *drawn.choices(range(FIRST_TOKEN, vocabulary), k=length - 1)]}

    def wishes(number: int) -> Any:
        plain = {"max_tokens": question["new_tokens"], "ignore_eos": True, "detokenize": False}
        if number % 2 == 0:
            return SamplingParams(temperature=0, **plain)
        many = {"top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1, "presence_penalty": 0.5, "logprobs": MOST_LOGPROBS}
        return SamplingParams(temperature=1, seed=number, **many, **plain)

    finished, began = 0, time.monotonic()
    with Lowest(free) as lowest:
        for turn in range(question["rounds"]):
            numbers = range(turn * together, (turn + 1) * together)
            made = engine.generate([prompt(one) for one in numbers], [wishes(one) for one in numbers], use_tqdm=False)
            finished += sum(len(one.outputs[0].token_ids) == question["new_tokens"] for one in made)
    load_s = time.monotonic() - began
    preempted = sum(int(one.value) for one in engine.get_metrics() if one.name == "vllm:num_preemptions")
    asked = question["rounds"] * together
    child.say({**answer, "free_lowest": lowest.value, "asked": asked, "finished": finished, "preempted": preempted, "load_s": load_s})


def own_bytes() -> int:
    found = resident()
    return found["anon"] + found["shared"]


def _tokens(engine: Any) -> int:
    """As vLLM counts them (its log's "GPU KV cache size")."""
    cache = engine.llm_engine.vllm_config.cache_config
    return getattr(cache, "kv_cache_size_tokens", None) or cache.num_gpu_blocks * cache.block_size


if __name__ == "__main__":
    main()
