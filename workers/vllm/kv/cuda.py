"""The worker class for CUDA. The cache gets the memory that is left after a rehearsal; a utilization is never read.

Importing this module imports vLLM.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from workers.kv.arithmetic import Demand
from workers.kv.memory import MemoryReading, host, taken_by_session
from workers.kv.release import forget_files, give_back
from workers.kv.settings import CacheSettings
from workers.kv.sizing import RanOut, Sizing
from workers.kv.start_gate import open_gate
from workers.vllm.kv.costs import need_of
from workers.vllm.kv.engine_identity import folders_of, identity_of
from workers.vllm.kv.gather import over_world
from workers.vllm.kv.rehearsal import all_decoding, graphs_of, is_v2, largest_prefill, minimal_cache, profiled, require, smaller_batches
from workers.vllm.kv.sized_worker import SizedWorker
from workers.vllm.symbols import has, symbol

Worker: Any = symbol("Worker")

# The driver's memory for a process, which no counter of torch shows: 0.35 GiB for one rank, as vLLM logs it ("non-torch").
CONTEXT_BYTES = 350 << 20
# More than any device has.
_MUCH = 1 << 60

logger = logging.getLogger("vllm.sparkd.kv")


class CudaRehearsal:
    """The rehearsal on CUDA: peaks come from torch's caching allocator, free memory from the driver and on an integrated GPU from the
    kernel too.

    frontends: bytes of the device that other processes of this engine will take later.
    """

    def __init__(self, worker: Any) -> None:
        self.frontends = 0
        self._worker = worker
        self._idle_allocated: int | None = None

    def warm(self) -> int:
        # The driver cannot take the page cache of the checkpoint; by now every rank has read the files.
        forget_files(folders_of(self._worker.vllm_config))
        with _refusals(), self._configured():
            peak = self._peak(self._worker.model_runner.profile_run)
            self._settle()
        return peak

    def rehearse(self, scale: float) -> Demand:
        runner: Any = self._worker.model_runner
        with _refusals(), self._configured():
            # The first run compiles; the compiler's passing memory is not part of the model's peak.
            with smaller_batches(runner, scale):
                self.warm()
            peaks = [profiled(runner, scale, self._peak)]
            with minimal_cache(runner):
                for run in (self._kernels, largest_prefill, all_decoding, self._requests):
                    peaks.append(self._whole(partial(run, runner, scale)))
            self._settle()
            before = self._free()
            graphs = graphs_of(runner)
            self._settle()
        # A first capture leaves memory behind (modules that the driver has loaded, its tables), which the real capture does not take again.
        left_behind = max(0, before - self._free())
        weights = int(runner.model_memory_usage)
        return Demand(max(0, graphs - left_behind), max(peaks), self.idle(), weights)

    def keep(self) -> None:
        # torch's allocator keeps what a batch took: a real one of that size asks the driver for nothing.
        runner: Any = self._worker.model_runner
        with _refusals(), self._configured(), torch.inference_mode():
            if runner.supports_mm_inputs:
                runner.profile_run()
            largest_prefill(runner)
            all_decoding(runner)
            torch.cuda.synchronize(self._worker.device)

    def taken(self) -> int:
        processes = taken_by_session() if self.read().is_shared else 0
        return torch.cuda.memory_reserved(self._worker.device) + CONTEXT_BYTES + processes

    def idle(self) -> int:
        device = self._worker.device
        return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def read(self) -> MemoryReading:
        """The memory of the worker's device. Callable from any thread: it names the device, because a thread's current device is 0 by
        default."""
        device = self._worker.device
        free, total = torch.cuda.mem_get_info(device)
        integrated = bool(torch.cuda.get_device_properties(device).is_integrated)
        reading = host()
        if integrated:
            reading = replace(reading, available=max(0, reading.available - self.frontends), free=max(0, reading.free - self.frontends))
        return replace(reading, device_free=max(0, free - self.frontends), device_total=total, integrated=integrated)

    def watch(self) -> MemoryReading:
        # torch keeps a device's properties from the first question on, so this asks no driver.
        integrated = torch.cuda.get_device_properties(self._worker.device).is_integrated
        return host() if integrated else self.read()

    def mark(self) -> None:
        """Begin a batch's peak. Only the first call counts, because the sampler's part of a batch runs after the model's."""
        if self._idle_allocated is None:
            self._idle_allocated = torch.cuda.memory_allocated(self._worker.device)
            torch.cuda.reset_peak_memory_stats(self._worker.device)

    def taken_by_batch(self) -> int:
        return max(0, torch.cuda.max_memory_allocated(self._worker.device) - (self._idle_allocated or 0))

    def _configured(self) -> contextlib.AbstractContextManager[Any]:
        """vLLM's configuration as the current one, as in vLLM's own profiling: compiled code may read it."""
        configured: contextlib.AbstractContextManager[Any] = symbol("set_current_vllm_config")(self._worker.vllm_config)
        return configured

    def _free(self) -> int:
        return torch.cuda.mem_get_info(self._worker.device)[0]

    def _peak(self, run: Callable[[], Any]) -> int:
        """The peak of torch's allocator during `run`, in bytes beyond those allocated before."""
        device = self._worker.device
        torch.cuda.synchronize(device)
        base = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return max(0, torch.cuda.max_memory_allocated(device) - base)

    def _whole(self, run: Callable[[], float]) -> int:
        """The peak of a whole batch, in bytes, from that of `run`, which returns the share of the batch that it ran."""
        share = [1.0]
        peak = self._peak(lambda: share.append(run()))
        return int(peak / share[-1])

    def _kernels(self, runner: Any, scale: float) -> float:
        """Run JIT compilers and autotuners now, before the cache takes the memory that they need for a moment."""
        kernel_warmup = symbol("kernel_warmup")
        with smaller_batches(runner, scale) as share:
            kernel_warmup(self._worker)
        return share

    def _requests(self, runner: Any, scale: float) -> float:
        """Run V2's warm-up, which uses every sampling option of a request; V2's profile run samples without any."""
        if not is_v2(runner):
            return 1.0
        with smaller_batches(runner, scale, sequences=True) as share:
            symbol("warmup_kernels")(runner, self._worker.execute_model, self._worker.sample_tokens)
        return share

    def _settle(self) -> None:
        torch.cuda.synchronize()
        forget_files(folders_of(self._worker.vllm_config))
        give_back()
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Raises RanOut where the device refuses memory."""
    try:
        yield
    except RuntimeError as error:
        # vLLM raises a RuntimeError of its own for a sampler that ran out (v1/worker/gpu_model_runner.py, _dummy_sampler_run).
        if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
            raise
        raise RanOut(str(error).partition(". ")[0]) from None


class SparkWorker(SizedWorker, Worker):
    """vLLM's GPU worker, with a KV cache that fills the memory left after a rehearsal (SPARKD_KV: workers/kv/settings.py)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rehearsal = CudaRehearsal(self)
        self._sizing = Sizing(
            self._rehearsal,
            CacheSettings.parse(os.environ).or_vllms(self.cache_config),
            lambda: need_of(self.vllm_config, self.get_kv_cache_spec()),
            self._identity,
            self.rank,
            gather=over_world,
        )

    def init_device(self) -> None:
        with open_gate(self.cache_config):
            super().init_device()

    def determine_available_memory(self) -> int:
        # vLLM's own method runs under inference_mode; the dummy runs need that here too.
        self._rehearsal.frontends = self._frontends()
        with torch.inference_mode():
            size = self._sizing.determine(self._stock)
        self.available_kv_cache_memory_bytes = size
        return size

    def _frontends(self) -> int:
        """Bytes of the device that vLLM leaves to its API servers for decoded images and videos (--mm-ipc-gpu-memory-gb)."""
        if not has("reserve_mm_ipc_gpu_memory"):
            return 0
        servers = self.parallel_config._api_process_count
        size = _MUCH - int(symbol("reserve_mm_ipc_gpu_memory")(_MUCH, self.model_config.multimodal_config, servers))
        if size:
            logger.info("sparkd: %.2f GiB of the device are left to what decodes images and videos.", size / 2**30)
        return size

    def _stock(self, limit: int | None) -> int:
        # As vLLM's request_memory: the fall-back needs no symbol that a release may lack.
        self.requested_memory = math.ceil(self.init_snapshot.total_memory * self.cache_config.gpu_memory_utilization)
        size = super().determine_available_memory()
        return size if limit is None else min(size, limit)

    def _identity(self) -> dict[str, Any]:
        require(self.model_runner)  # now, because all ranks follow the vote of which this is a part
        device = torch.cuda.get_device_properties(self.device)
        return identity_of(self.vllm_config, f"{device.name} {device.total_memory}", self.rank)
