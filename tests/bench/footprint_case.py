"""The child that measures what one engine takes: its weights, its cache, its largest batch. Never predicts anything.

Standard input: {"model", "arguments", "prompt_tokens", "prompts"}; SPARKD_KV in the environment names the report. The worker class is the
product's, with a look at the memory before and after its weights came.
Answer, in bytes: {"weights": of all tensors that its modules hold, each storage once; "weights_grown": what process or device grew by;
"load_peak": the most while the weights came, "total_peak": the most since they are there, both above what was taken before them;
"rehearsal_peak": of it, before the cache was there;
"report": what the worker tells of its cache; "allocated_peak": of total_peak, what torch's allocator had handed out at most, on a GPU}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.bench import child
from workers.kv import request
from workers.kv.memory import forget_peak, peak_resident_bytes, resident_bytes
from workers.kv.release import give_back
from workers.kv.settings import VARIABLE

WORKERS = {"cpu": "tests.bench.footprint_case.MeasuredCPUWorker", "cuda": "tests.bench.footprint_case.MeasuredWorker"}
MEASURED: dict[str, int] = {}


def main() -> None:
    question = json.load(sys.stdin)
    from vllm import LLM, SamplingParams, TokensPrompt

    # However much is free: the largest batch is to be measured.
    request.PLENTY_BYTES = 1 << 60
    engine = LLM(question["model"], **question["arguments"])
    (weights,) = engine.apply_model(held_bytes)
    tokens = question["prompt_tokens"]
    longest = [TokensPrompt(prompt_token_ids=[5 + number % 200] * tokens) for number in range(question["prompts"])]
    # Every way of the sampler: top-k and top-p sort the whole vocabulary.
    engine.generate(longest, SamplingParams(temperature=1.0, top_k=50, top_p=0.9, max_tokens=4, ignore_eos=True), use_tqdm=False)
    report = json.loads(Path(json.loads(os.environ[VARIABLE])["report"]).read_text())
    peaks = {"total_peak": _peak() - MEASURED.pop("before"), "allocated_peak": _allocated_peak() - MEASURED.pop("allocated_before")}
    child.say({"weights": weights, **MEASURED, **peaks, "report": report})


def held_bytes(model: Any) -> int:
    """Of parameters, buffers and whatever else a module holds as a tensor (latent attention keeps matrices so), but for its cache."""
    import torch

    storages: dict[int, int] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers, vars(module)):
            for name, one in held.items():
                if isinstance(one, torch.Tensor) and name != "kv_cache":
                    storage = one.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _taken() -> int:
    import torch

    return torch.cuda.memory_reserved() if torch.cuda.is_available() else resident_bytes()


def _peak() -> int:
    import torch

    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else peak_resident_bytes()


def _allocated_peak() -> int:
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def _begin() -> None:
    """Peaks count anew from here."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return
    give_back()
    forget_peak()


def _measured(load: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    _begin()
    MEASURED["before"], MEASURED["allocated_before"] = _taken(), _allocated_peak()
    loaded = load(worker, *args, **kwargs)
    MEASURED["load_peak"] = _peak() - MEASURED["before"]
    _begin()
    MEASURED["weights_grown"] = _taken() - MEASURED["before"]
    return loaded


def _rehearsed(worker_method: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    MEASURED["rehearsal_peak"] = _peak() - MEASURED["before"]
    return worker_method(worker, *args, **kwargs)


def __getattr__(name: str) -> Any:
    """The worker classes, only when vLLM asks for one: each imports its own platform's."""
    if name not in ("MeasuredCPUWorker", "MeasuredWorker"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import tests.bench.footprint_case as here  # vLLM imports this module by its name, while it runs as __main__
    import workers.kv

    base = workers.kv.SparkCPUWorker if name == "MeasuredCPUWorker" else workers.kv.SparkWorker

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        return here._measured(base.load_model, self, *args, **kwargs)

    def initialize_from_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        return here._rehearsed(base.initialize_from_config, self, *args, **kwargs)

    methods = {"load_model": load_model, "initialize_from_config": initialize_from_config}
    return type(name, (base,), {**methods, "__module__": __name__})


if __name__ == "__main__":
    from tests.bench.footprint_case import main as run

    run()
