"""One engine start, measured: a plugin that wraps each rank's load, and the process that starts the engine. Never prepares a checkpoint.

The wrapper goes into every process in which vLLM loads its plugins, ranks of a tensor-parallel engine included, and writes one JSON file
for each rank into the folder that SPARKD_BENCH_LOADS names. Byte figures are above the values just before `load_model`, those that are
called above_final above the values just after it. The bar takes peak_above_before less the parameters: what a load leaves behind besides
them (pages of libraries that it loaded, heap that did not go back) is in "just after", and a figure above that does not count it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.bench import child, sampling

FOLDER = "SPARKD_BENCH_LOADS"
DIGESTS = "SPARKD_BENCH_DIGESTS"  # set: what each rank holds is digested too, once everything is measured
_TIMED_TOKENS = 32


def install() -> None:
    """The entry point. Wraps BaseModelLoader.load_model once, where SPARKD_BENCH_LOADS is set."""
    with suppress(ImportError):
        # vLLM 0.33 prefers these kernels on Hopper GPUs alone; a GB10 gets Marlin.
        from vllm.model_executor.layers.quantization.utils.humming import priority

        priority._HUMMING_PREFERRED_CAPABILITIES = frozenset()
    if not os.environ.get(FOLDER):
        return
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    if hasattr(BaseModelLoader.load_model, "sparkd_bench"):
        return
    stock = BaseModelLoader.load_model

    @functools.wraps(stock)
    def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        load = Load(self)
        model = load.run(lambda: stock(self, *args, **kwargs))
        load.write(Path(os.environ[FOLDER]))
        return model

    measured.sparkd_bench = True  # type: ignore[attr-defined]
    BaseModelLoader.load_model = measured


class Load:
    """One call of load_model: `run` it, then `write` what it cost."""

    def __init__(self, loader: Any) -> None:
        import torch

        self._cuda = torch.cuda if torch.cuda.is_available() else None
        self._weights_s = 0.0
        stock = loader.load_weights

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = stock(*args, **kwargs)
            if self._cuda:
                self._cuda.synchronize()
            self._weights_s = time.perf_counter() - started
            return result

        loader.load_weights = timed

    def run(self, load: Any) -> Any:
        before, device_before = sampling.settled(), self._device()
        if self._cuda:
            self._cuda.reset_peak_memory_stats()
        read = sampling.read_bytes()
        started = time.perf_counter()
        with sampling.Sampler() as sampler:
            model = load()
            if self._cuda:
                self._cuda.synchronize()
            load_s = time.perf_counter() - started
        read_after = sampling.read_bytes()
        after, device_after = sampling.settled(), self._device()
        peaks = {key: max(value, after[key]) for key, value in sampler.peaks.items()}
        self.found = {
            "load_s": load_s,
            "weights_s": self._weights_s,
            "read_bytes": None if read is None or read_after is None else read_after - read,
            "peak_above_final": {key: peaks[key] - after[key] for key in peaks},
            "peak_above_before": {key: peaks[key] - before[key] for key in peaks},
            "device_final": device_after.get("allocated", 0) - device_before.get("allocated", 0),
            "device_peak_above_final": device_after.get("peak", 0) - device_after.get("allocated", 0),
            "parameter_bytes": _parameter_bytes(model),
            "rank": _rank(),
        }
        if os.environ.get(DIGESTS):
            self.found["digests"] = digests(model)
        return model

    def write(self, folder: Path) -> None:
        """One file for each rank; a later load of the same process (a draft model) does not replace the first."""
        path = folder / f"{os.getpid()}.json"
        if not path.exists():
            path.write_text(json.dumps(self.found), encoding="utf-8")

    def _device(self) -> dict[str, int]:
        """Bytes that torch has allocated, and their peak since the last reset. {} without a GPU."""
        if self._cuda is None:
            return {}
        self._cuda.synchronize()
        return {"allocated": self._cuda.memory_allocated(), "peak": self._cuda.max_memory_allocated()}


def _rank() -> int:
    from torch import distributed

    return int(distributed.get_rank()) if distributed.is_initialized() else 0


def _parameter_bytes(model: Any) -> int:
    """Bytes of the storages that the model's parameters and buffers hold, each once."""
    storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def digests(model: Any) -> dict[str, str]:
    """Name -> `dtype [shape] sha256` of every parameter and buffer, as the kernels find them."""
    import torch

    found = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        # Nothing reads a weight's shape, so nothing fills it: its bytes are whatever the memory held.
        if not name.endswith("weight_shape") and not tensor.is_meta:
            data = tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy()
            found[name] = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"
    return found


def main() -> None:
    """Standard input: {"model", "arguments", "generate": bool, "progress": path or null}."""
    question = json.load(sys.stdin)
    from vllm import LLM, SamplingParams

    engine = LLM(question["model"], skip_tokenizer_init=True, **question["arguments"])
    answer: dict[str, Any] = {}
    if question.get("generate", True):
        prompt = {"prompt_token_ids": [256, *range(1, 16)]}

        def generated(count: int) -> tuple[list[int], float]:
            sampling_params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            started = time.perf_counter()
            made = engine.generate([prompt], sampling_params, use_tqdm=False)
            return list(made[0].outputs[0].token_ids), time.perf_counter() - started

        tokens, _ = generated(8)
        (_, short_s), (_, long_s) = generated(1), generated(1 + _TIMED_TOKENS)
        answer = {"tokens": tokens, "tokens_per_s": _TIMED_TOKENS / max(long_s - short_s, 1e-9)}
    child.say({**answer, "cache": _cache_state(question.get("progress"))})


def _cache_state(progress: str | None) -> dict[str, Any]:
    """The first rank's; `bytes` is the sum over the ranks."""
    if progress is None or not os.path.exists(progress):
        return {"state": "none"}
    files = [Path(progress), *sorted(Path(progress).parent.glob(f"{Path(progress).name}.tp*"))]
    loads = [json.loads(path.read_text(encoding="utf-8"))["load"] for path in files]
    first, total = loads[0], sum(load["cache_bytes"] for load in loads)
    return {"state": first["cache_state"], "why": first["cache_why"], "bytes": total, "source": first["source"], "direct": first["direct"]}


if __name__ == "__main__":
    main()
