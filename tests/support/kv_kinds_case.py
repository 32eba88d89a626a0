"""Engines of several kinds of attention, one after the other, sized by the worker class under test: JSON on stdin, a JSON line for each.

    {"folder": FOLDER, "kinds": [NAME], "pool_bytes": N}  ->  {"kind": NAME, "finished": N, "preempted": N, "tokens": N, "report": {...},
                                                               "told": {...}}
                                                              {"kind": REFUSED, "refused": SENTENCE, "report": {...}}

tokens: what vLLM itself says the cache holds. told: what the ranks' reports say together. REFUSED: an engine that must leave all of the
machine free. One process, because importing vLLM takes longer than each of them; in a session of its own (tests/support/given_memory.py).
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.support.architectures import ARCHITECTURES
from tests.support.checkpoints import write_checkpoint
from tests.support.given_memory import SIZE_BYTES, given, install
from workers.kv.settings import VARIABLE
from workers.rank.report import cache_of

GIB = 2**30
MAX_MODEL_LEN, MAX_NUM_SEQS = 512, 3
REFUSED = "refused"
TWO_RANKS = "two ranks"
_N_GRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
# name -> (architecture, engine arguments)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sliding": ("gemma3", {}),
    "latent": ("deepseek_v3", {}),
    "linear": ("qwen3_next", {}),
    "draft model": ("llama", {"speculative_config": {"model": "llama", "num_speculative_tokens": 2}}),
    TWO_RANKS: ("llama", {"tensor_parallel_size": 2, "worker_cls": "tests.support.kv_unequal.UnequalWorker"}),
    # The last: it imports numba, whose functions vLLM 0.32 stumbles over when another engine starts in the process.
    "n-gram": ("llama", {"speculative_config": _N_GRAM}),
}


def main() -> None:
    case: dict[str, Any] = json.load(sys.stdin)
    folder = Path(case["folder"])
    install()
    for kind in case["kinds"]:
        found = refused(folder) if kind == REFUSED else run(kind, folder, case["pool_bytes"])
        print(f"\nkv_kind {json.dumps({'kind': kind, **found})}", flush=True)
        gc.collect()


def refused(folder: Path) -> dict[str, Any]:
    from vllm import LLM

    report = folder / "report"
    os.environ[VARIABLE] = json.dumps({"margin_bytes": SIZE_BYTES, "report": str(report)})
    model = str(written("llama", folder))
    try:
        LLM(model, worker_cls="workers.kv.SparkCPUWorker", enforce_eager=True, max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS)
    except ValueError as error:
        return {"refused": str(error), "report": json.loads(report.read_text())["cache"]}
    return {"refused": None, "report": json.loads(report.read_text())["cache"]}


def run(kind: str, folder: Path, pool_bytes: int) -> dict[str, Any]:
    """The worst load that one engine admits: twice as many prompts of the longest length as may run together."""
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.distributed import cleanup_dist_env_and_memory

    architecture, more = KINDS[kind]
    if "model" in more.get("speculative_config", {}):
        more = {**more, "speculative_config": {**more["speculative_config"], "model": str(written(architecture, folder))}}
    report = folder / "report"
    left = 4 * GIB * more.get("tensor_parallel_size", 1)
    known = {"margin_bytes": max(0, given().room - left), "at_most_bytes": pool_bytes, "report": str(report)}
    if kind == TWO_RANKS:
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    os.environ[VARIABLE] = json.dumps(known)
    llm = LLM(
        str(written(architecture, folder)),
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        disable_log_stats=False,
        **{"worker_cls": "workers.kv.SparkCPUWorker", "max_num_batched_tokens": MAX_MODEL_LEN // 4, "enable_prefix_caching": False, **more},
    )
    longest = [TokensPrompt(prompt_token_ids=[5 + number] * (MAX_MODEL_LEN - 2)) for number in range(2 * MAX_NUM_SEQS)]
    done = llm.generate(longest, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
    preempted = sum(one.value for one in llm.get_metrics() if one.name == "vllm:num_preemptions")
    tokens = llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens
    finished = sum(len(one.outputs[0].token_ids) == 2 for one in done)
    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    return {
        "finished": finished,
        "preempted": preempted,
        "tokens": tokens,
        "report": json.loads(report.read_text())["cache"],
        "told": cache_of(report),
    }


def written(architecture: str, folder: Path) -> Path:
    """The checkpoint, once."""
    path = folder / architecture
    if not path.exists():
        model = ARCHITECTURES[architecture]()
        write_checkpoint(path, model.config, model.entries)
    return path


if __name__ == "__main__":
    main()
