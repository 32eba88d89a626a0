"""The worker class for vLLM's CPU backend, whose cache has a size or takes what is left: no batch is rehearsed. It never touches a GPU.

Importing this module imports vLLM.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import replace
from typing import Any

from sparkd.errors import MissingSymbol
from workers.host.processes import boot_id
from workers.kv.agreement import Gather
from workers.kv.arithmetic import GIB, Demand
from workers.kv.memory import MemoryReading, host, taken_by_session
from workers.kv.release import forget_files, give_back
from workers.kv.settings import CacheSettings
from workers.kv.sizing import Sizing
from workers.kv.start_gate import GATE, open_gate
from workers.vllm.kv.costs import need_of
from workers.vllm.kv.engine_identity import folders_of, identity_of
from workers.vllm.kv.gather import over_world
from workers.vllm.kv.sized_worker import SizedWorker
from workers.vllm.symbols import method, symbol

CPUWorker: Any = symbol("CPUWorker")
# The passing need of a batch, of a model that is small enough for a CPU.
ASSUMED = Demand(peak=GIB // 2)


class CpuMemory:
    """Sizing's view of a CPU's machine. The ranks of one engine on one host size their caches at the same moment."""

    def __init__(self, worker: CPUWorker) -> None:
        self._worker = worker
        self._sharers = max(1, worker.parallel_config.local_world_size)

    def meet(self, gather: Gather[str]) -> None:
        """Count the ranks on this host, where Ray placed them. Sizing reports a symbol that is missing."""
        with contextlib.suppress(MissingSymbol):
            self._sharers = gather(boot_id()).count(boot_id())

    def warm(self) -> int:
        """Compile the model. The batch is small: returns 0."""
        if method(self._worker, "_should_warm_up_model")():
            self._worker.model_runner.warming_up_model()
        forget_files(folders_of(self._worker.vllm_config))
        give_back()
        return 0

    def rehearse(self, scale: float) -> Demand:
        return ASSUMED

    def keep(self) -> None: ...

    def read(self) -> MemoryReading:
        return replace(host(), sharers=self._sharers)

    def watch(self) -> MemoryReading:
        return self.read()

    def taken(self) -> int:
        return taken_by_session()

    def idle(self) -> int:
        return 0

    def mark(self) -> None: ...

    def taken_by_batch(self) -> int:
        return 0


class SparkCPUWorker(SizedWorker, CPUWorker):
    """vLLM's CPU worker, with a KV cache of a given size, or of what is left (SPARKD_KV: workers/kv/settings.py)."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        with open_gate(vllm_config.cache_config):
            super().__init__(vllm_config, *args, **kwargs)
        self._rehearsal = CpuMemory(self)
        self._sizing = Sizing(
            self._rehearsal,
            CacheSettings.parse(os.environ).or_vllms(self.cache_config),
            lambda: need_of(self.vllm_config, self.get_kv_cache_spec()),
            lambda: identity_of(self.vllm_config, "cpu", self.rank),
            self.rank,
            gather=over_world,
            assumed=ASSUMED,
        )

    def compile_or_warm_up_model(self) -> Any:
        receive(self.model_runner, self.parallel_config.pipeline_parallel_size)
        return super().compile_or_warm_up_model()

    def determine_available_memory(self) -> int:
        self._rehearsal.meet(over_world)
        return self._sizing.determine(self._stock)

    def _stock(self, limit: int | None) -> int:
        if limit is not None and self.cache_config.kv_cache_memory_bytes is None:
            self.cache_config.kv_cache_memory_bytes = limit
        # The value that the constructor would compute with the original utilization.
        self.requested_cpu_memory: int = math.ceil(vars(self)["requested_cpu_memory"] / GATE * self.cache_config.gpu_memory_utilization)
        return super().determine_available_memory()


def receive(runner: Any, stages: int) -> None:
    """Make the buffer in which a later stage of a pipeline receives the tensors of the stage before. vLLM makes it in a dummy run, which
    its CPU backend does not have where nothing is compiled: the first request would end the engine."""
    if stages > 1 and runner.intermediate_tensors is None and hasattr(runner.model, "make_empty_intermediate_tensors"):
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
