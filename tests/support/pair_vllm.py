"""Real vLLM over two nodes: one model in each way that it can be shared, and how far apart two ways of it speak. Never starts one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.architectures import write_qwen3_moe
from tests.support.daemon_process import DaemonProcess
from tests.support.pair import Pair
from workers.host.runtime import API_SERVER

POSITIONS, TOP_TOKENS, AGREED = 32, 5, 0.05
Said = list[dict[str, float]]


def vllm_models(folder: Path, *, on_gpu: bool = False) -> dict[str, dict[str, Any]]:
    """split (native ranks) and rayed (vLLM's Ray executor) share tensors, and whole is the same model on one node; piped has three heads,
    which no two ranks share, and alone is that on one. The shared ones need 5 GiB on one node, and 4 on each of two.

    on_gpu: each node has a GPU. Both nodes have one host name, which vLLM's own all-reduce takes for one machine.
    """
    if on_gpu:
        shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 8, "hidden_size": 1024}
        model = _chat_model(folder / "moe", **shape)
        env = {"NCCL_NET": "Socket", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        shared = {"model": str(model), "entrypoint": API_SERVER, "max_model_len": 1024, "max_num_seqs": 8, "memory_gib": 20, "env": env}
        shared |= {"extra_args": ["--disable-custom-all-reduce"], "kv_cache": {"tokens": 8192}}
        return {
            "split": shared | {"tensor_parallel": 2},
            "rayed": shared | {"tensor_parallel": 2, "executor": "ray"},
            "whole": shared | {"tensor_parallel": 1},
        }
    vllm = {"model": str(_chat_model(folder / "moe")), "entrypoint": API_SERVER, "max_model_len": 1024, "max_num_seqs": 4}
    vllm |= {"max_num_batched_tokens": 1024, "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}}
    odd = vllm | {"model": str(_chat_model(folder / "odd", num_attention_heads=3, num_key_value_heads=3))}
    return {
        "split": vllm | {"kv_cache": {"tokens": 1_500_000}},
        "rayed": vllm | {"kv_cache": {"tokens": 1_500_000}, "executor": "ray"},
        "whole": vllm | {"kv_cache": {"tokens": 8192}, "tensor_parallel": 1},
        "piped": odd | {"kv_cache": {"tokens": 1_000_000}},
        "alone": odd | {"kv_cache": {"tokens": 8192}, "tensor_parallel": 1},
    }


def log_probabilities(pair: Pair, model: str) -> Said:
    return prompt_log_probabilities(pair.daemon, model, 2 * TOP_TOKENS)


def prompt_log_probabilities(daemon: DaemonProcess, model: str, tokens: int) -> Said:
    """Those of the first positions of one prompt, by token, of so many tokens each. Teacher-forced: sampled text of a random model would
    diverge on rounding. Raises RuntimeError with the answer that is none."""
    body = {"model": model, "prompt": list(range(30, 35 + 5 * POSITIONS, 5)), "max_tokens": 1, "prompt_logprobs": tokens}
    answer = daemon.client.post("/v1/completions", json=body)
    if answer.status_code != 200:
        raise RuntimeError(f"{answer.status_code}: {answer.text[:300]}")
    found = answer.json()["choices"][0]["prompt_logprobs"][1:]
    return [{token: one["logprob"] for token, one in at.items()} for at in found]


def furthest(one: Said, other: Said) -> float:
    """The largest difference of a log-probability that both tell of. Each position must have the most likely tokens of both."""
    shared = [{token: (here[token], there[token]) for token in here.keys() & there.keys()} for here, there in zip(one, other, strict=True)]
    assert len(shared) == POSITIONS
    assert all(len(tokens) >= TOP_TOKENS for tokens in shared)
    return max(abs(here - there) for tokens in shared for here, there in tokens.values())


def _chat_model(folder: Path, **shape: int) -> Path:
    """Every expert answers for every token: rounding could choose others, and other values."""
    return with_chat_template(write_qwen3_moe(folder, **shape))


def with_chat_template(folder: Path) -> Path:
    """The same checkpoint, which answers chats: with the messages' own text."""
    path = folder / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return folder
