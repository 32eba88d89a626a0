"""The worker class for vLLM's CPU backend. It never touches a GPU.

Importing this module imports vLLM.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sparkd.errors import MissingSymbol
from workers.kv.agreement import Gather
from workers.kv.arithmetic import Demand
from workers.kv.memory import MemoryReading, boot_id, forget_peak, host, peak_resident_bytes, resident_bytes, taken_by_session
from workers.kv.release import forget_files, give_back, trim
from workers.kv.settings import CacheSettings
from workers.kv.sizing import Sizing
from workers.kv.start_gate import GATE, open_gate
from workers.vllm.kv.costs import need_of
from workers.vllm.kv.engine_identity import folders_of, identity_of
from workers.vllm.kv.gather import over_world
from workers.vllm.kv.rehearsal import all_decoding, largest_prefill, minimal_cache, profiled, receive
from workers.vllm.kv.sized_worker import SizedWorker
from workers.vllm.symbols import method, symbol

CPUWorker: Any = symbol("CPUWorker")


class CpuRehearsal:
    """The rehearsal on a CPU: the peak of the engine process's resident memory shows a batch's need."""

    def __init__(self, worker: CPUWorker) -> None:
        self.weights = 0
        self._worker = worker
        self._resident = 0
        self._sharers = max(1, worker.parallel_config.local_world_size)

    def meet(self, gather: Gather[Any]) -> None:
        """Count the ranks on this host."""
        mine = boot_id()
        try:
            self._sharers = gather(mine).count(mine)
        except MissingSymbol:
            return  # the missing symbol is reported where the ranks agree on their sizes

    def warm(self) -> int:
        """Compile the model. The batch is small, so its peak is no measure of the largest: returns 0."""
        forget_files(folders_of(self._worker.vllm_config))
        if method(self._worker, "_should_warm_up_model")():
            self._worker.model_runner.warming_up_model()
        self._settle()
        return 0

    def rehearse(self, scale: float) -> Demand:
        runner: Any = self._worker.model_runner
        self.warm()
        shares = [1.0]
        with minimal_cache(runner):
            # The profile run counts for the encoders only; the largest batches below cover the rest.
            encoders = profiled(runner, scale, self._peak) if runner.supports_mm_inputs else 0
            prefill = self._peak(lambda: shares.append(largest_prefill(runner, scale))) / shares[-1]
            decoding = self._peak(lambda: shares.append(all_decoding(runner, scale))) / shares[-1]
        self._settle()
        return Demand(peak=max(encoders, int(prefill), int(decoding)), weights=self.weights)

    def keep(self) -> None:
        """Nothing: the C allocator would give the memory back."""

    def read(self) -> MemoryReading:
        """The host's memory. Ranks of one engine on one host size their caches at the same moment, each from the same numbers."""
        return replace(host(), sharers=self._sharers)

    def watch(self) -> MemoryReading:
        return self.read()

    def taken(self) -> int:
        return taken_by_session()

    def idle(self) -> int:
        """0: the C allocator's free pages are returned to the system before each reading."""
        return 0

    def mark(self) -> None:
        forget_peak()

    def taken_by_batch(self) -> int:
        """The peak of the batch without the memory that stays, which is pages of the cache that the batch wrote first."""
        peak = peak_resident_bytes()
        trim()
        return max(0, peak - resident_bytes())

    def untouched(self, pool_bytes: int) -> int:
        """Bytes of the cache that are still free: its pages are zero pages until a request writes them."""
        return pool_bytes - min(pool_bytes, max(0, resident_bytes() - self._resident))

    def _peak(self, run: Callable[[], Any]) -> int:
        """The peak of resident memory during `run`, in bytes beyond that of the idle engine."""
        forget_peak()
        run()
        return max(0, peak_resident_bytes() - self._resident)

    def _settle(self) -> None:
        forget_files(folders_of(self._worker.vllm_config))
        give_back()
        self._resident = resident_bytes()


class SparkCPUWorker(SizedWorker, CPUWorker):
    """vLLM's CPU worker, with a KV cache that fills the memory left after a rehearsal (SPARKD_KV: workers/kv/settings.py)."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        with open_gate(vllm_config.cache_config):
            super().__init__(vllm_config, *args, **kwargs)
        self._rehearsal = CpuRehearsal(self)
        self._sizing = Sizing(
            self._rehearsal,
            CacheSettings.parse(os.environ).or_vllms(self.cache_config),
            lambda: need_of(self.vllm_config, self.get_kv_cache_spec()),
            lambda: identity_of(self.vllm_config, "cpu", self.rank),
            self.rank,
            gather=over_world,
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model and measure the weights by the process's memory, because kernels keep weights in tensors that no module names."""
        before = resident_bytes()
        super().load_model(*args, **kwargs)
        give_back()
        self._rehearsal.weights = max(0, resident_bytes() - before)

    def compile_or_warm_up_model(self) -> Any:
        receive(self.model_runner, self.parallel_config.pipeline_parallel_size)
        return super().compile_or_warm_up_model()

    def determine_available_memory(self) -> int:
        self._rehearsal.meet(over_world)
        return self._sizing.determine(self._stock)

    def _stock(self, limit: int | None) -> int:
        if limit is not None and self.cache_config.kv_cache_memory_bytes is None:
            self.cache_config.kv_cache_memory_bytes = limit
        # The value that the constructor would compute with the original utilization, in releases that store it.
        requested: float | None = getattr(self, "requested_cpu_memory", None)
        if requested is not None:
            self.requested_cpu_memory = math.ceil(requested / GATE * self.cache_config.gpu_memory_utilization)
        return super().determine_available_memory()
