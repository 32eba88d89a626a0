"""The load format `spark_stream`: joins the streaming loader's modules to vLLM's model loader.

Importing this module imports vLLM. See pipeline.py for the pass over the checkpoint, and trace.py for how a rank's share is found.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import logging
import re
import threading
import time
from collections.abc import Collection, Generator, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from sparkd.checkpoint import Checkpoint, read_checkpoint
from sparkd.errors import CheckpointError, SparkdError
from workers.cache.load_session import LoadSession, virtual_of
from workers.cache.manifest import on_device
from workers.cache.store import SPELLINGS, UNMEASURED_INPUTS, CachedCheckpoint, find
from workers.cache.writer import CacheContent
from workers.load.formats import amax_each, global_scale, quantizer
from workers.load.input_scales import CURE, measured
from workers.load.progress import ProgressFile
from workers.load.reader import Reader
from workers.load.virtual import VirtualCheckpoint
from workers.quantization.calibration_text import text_of
from workers.quantization.formats import Format
from workers.vllm.load.ask_model import ANOTHER_MODEL, ask, rank_of_world, source_of
from workers.vllm.load.config import NAME, LoaderSettings, linear_modules, local_folder, quantization_config
from workers.vllm.load.method import formats_of
from workers.vllm.load.repack import repack_in_place
from workers.vllm.symbols import symbol

DefaultModelLoader: Any = symbol("DefaultModelLoader")

logger = logging.getLogger("vllm.sparkd.stream")

# Blocks of 8 MiB. A CPU quantizes 0.2 GB/s: half of a GPU's ring keeps it busy, and more would waste memory.
RING_BLOCKS, CPU_RING_BLOCKS = 8, 4
# The first GPUs with FP4 tensor cores.
_FP4_CAPABILITY = (10, 0)
# The errors of a model class that does not accept a tensor.
_MISMATCHES = (AssertionError, LookupError, AttributeError, RuntimeError, ValueError, TypeError)
_NO_PLACE = "There is no module or parameter named"
# Messages of torch's CPU allocator (c10/core/impl/alloc_cpu.cpp), Triton's launcher, cuBLAS, and errno 12 for a mapped file.
_NO_MEMORY = re.compile(r"can't allocate memory|out of memory|STATUS_ALLOC_FAILED|Cannot allocate memory")
_QUANTIZED = "; if they are, that layer has no such form in this vLLM, and its name in `keep` leaves it as it is"
# The limit of vLLM's message, which may continue with all names that vLLM accepts.
_TEXT = 160


class SparkStreamLoader(DefaultModelLoader):
    """Load format `spark_stream`: yields the tensors of a virtual quantized checkpoint to vLLM, each as soon as its bytes are read."""

    def __init__(self, load_config: Any) -> None:
        # The base class refuses unknown settings and formats, so it gets a copy without them.
        self._settings = LoaderSettings.parse(load_config.model_loader_extra_config or {})
        plain = copy.copy(load_config)
        plain.model_loader_extra_config = {}
        plain.load_format = "safetensors"
        super().__init__(plain)
        self._virtual: VirtualCheckpoint | None = None
        self._session: LoadSession | None = None
        self._tensors: Generator[tuple[str, torch.Tensor]] | None = None
        self._progress: ProgressFile | None = None
        self._placing = ""

    def load_model(self, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Load as the base class does. On a GPU, compile the kernels meanwhile, so that the first unit does not wait for them.

        If a cache will probably be read, nothing is compiled: nothing will be quantized, and Triton first hashes 400 MB of its own files.
        """
        if model_config.quantization == NAME and torch.cuda.is_available() and not self._settings.may_be_cached(model_config.model):
            described = getattr(model_config.hf_config, "quantization_config", None) or {}
            _compile_kernels(formats_of(described), torch.device("cuda", torch.cuda.current_device()))
        return super().load_model(vllm_config, model_config, *args, **kwargs)

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Load as the base class does. Raises CheckpointError with file and tensor if vLLM's model class does not accept a tensor."""
        try:
            with _young_garbage_only():
                super().load_weights(model, model_config)
        except BaseException as error:  # includes SystemExit by SIGTERM: no half-written cache may stay
            # While we make a tensor, our generator runs and ends by its error. It is suspended while vLLM's class has the tensor.
            is_placing = self._tensors is not None and inspect.getgeneratorstate(self._tensors) == inspect.GEN_SUSPENDED
            self._abandon()
            refused = self._refusal(error, model, is_placing=is_placing)
            if refused is None:
                raise
            raise refused from error
        finally:
            self._session = None

    def _abandon(self) -> None:
        if self._tensors is not None:
            self._tensors.close()  # the traceback would keep it alive, and with it a half-written cache
        if self._session is not None:
            self._session.close()  # closing a generator that never ran closes nothing

    def _refusal(self, error: BaseException, model: torch.nn.Module, *, is_placing: bool) -> CheckpointError | None:
        """Report `error` to the daemon. Returns the CheckpointError to raise instead, or None.

        is_placing: vLLM's class raised it while it had a tensor. Any other error says nothing of the checkpoint: the next load may succeed.
        """
        if self._progress is None:
            return None
        if isinstance(error, SparkdError):
            self._progress.failed(error.message)
            return None
        from_device = isinstance(error, torch.AcceleratorError) or _is_out_of_memory(error)
        is_mismatch = isinstance(error, _MISMATCHES) and not from_device
        if not (is_placing and is_mismatch) or self._virtual is None:
            self._progress.failed(_ended(error))
            return None
        refused = _mismatch(self._virtual, self._placing, type(model).__name__, error)
        self._progress.failed(refused.message, lasting=True)
        return refused

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of this rank's model, quantized. Raises CheckpointError, after which the engine does not start."""
        self.counter_before_loading_weights = time.perf_counter()
        progress = self._progress = ProgressFile(self._settings.progress, rank_of_world()[0])
        self._tensors = self._streamed(self._prepared(model_config, model, progress), model)
        return self._tensors

    def _prepared(self, model_config: Any, model: torch.nn.Module, progress: ProgressFile) -> LoadSession:
        """The session of this load: from the cache entry that holds the whole model, or else from the checkpoint."""
        checkpoint = read_checkpoint(local_folder(model_config.model, model_config.revision, self.load_config.download_dir))
        device = next(model.parameters()).device
        recipe, cache_dir = self._settings.recipe, self._settings.cache_dir
        if device.type == "cuda":
            repack_in_place()
            if recipe.rounds_activations and torch.cuda.get_device_capability(device) < _FP4_CAPABILITY:
                logger.warning("sparkd: this GPU has no FP4 arithmetic: layers in nvfp4-a4 are computed with activations in 16 bits.")
        is_spark = model_config.quantization == NAME
        cache_recipe = on_device(recipe.canonical(), device.type)
        entry = find(cache_dir, checkpoint, cache_recipe, say=logger.info) if is_spark and cache_dir is not None else None
        if entry is not None:
            try:
                session = self._session_of(virtual_of(entry), model_config, model, checkpoint, progress, entry)
                return self._begun(session, entry.spellings)
            except CheckpointError as error:
                # If the checkpoint has the same fault, reading it raises the error again.
                logger.info(
                    "sparkd: the quantized cache %s does not suit this model: %s The checkpoint is read.", entry.folder, error.message
                )
                entry.close()
            except BaseException:
                entry.close()
                raise
        formats = recipe.assign(checkpoint) if is_spark else {}
        spellings = sorted({form.spelling for form in formats.values()})
        virtual = VirtualCheckpoint(checkpoint, formats)
        unmeasured = 0
        if any(form.rounds_activations for form in formats.values()):
            progress.begin(0, 0, "", "calibration")
            # The ranks of a node take turns at the file, and those after the first find what it has kept. In a broadcast they would wait
            # for no longer than gloo does, which is less than a large model takes.
            inputs = measured(checkpoint, text_of(recipe.calibration), cache_dir or symbol("VLLM_CACHE_ROOT"))
            virtual.input_scale = inputs.of
            unmeasured = inputs.unmeasured(virtual.rounded_inputs)
            _warn_of_unmeasured(unmeasured)
        session = self._session_of(virtual, model_config, model, checkpoint, progress)
        if formats and cache_dir is not None:
            described = quantization_config(formats, linear_modules(checkpoint))
            notes = {SPELLINGS: spellings, UNMEASURED_INPUTS: unmeasured}
            content = CacheContent(checkpoint, cache_recipe, None, described, {}, notes)
            session.use_cache(cache_dir, content, self._settings.cache_limit_bytes, rank_of_world())
        return self._begun(session, spellings)

    def _session_of(
        self,
        virtual: VirtualCheckpoint,
        model_config: Any,
        model: torch.nn.Module,
        checkpoint: Checkpoint,
        progress: ProgressFile,
        entry: CachedCheckpoint | None = None,
    ) -> LoadSession:
        """The session that loads `virtual`, which stands for the checkpoint, or for the cache entry that holds all of it."""
        self._virtual = virtual
        device = next(model.parameters()).device
        check = partial(self.track_weights_loading, quantized=True) if self._settings.enable_weights_track else None
        is_quantized = bool(virtual.formats) or entry is not None
        trace = ask(virtual, model, model_config, device, checkpoint.folder, quantized=is_quantized, check=check)
        on_gpu = device.type == "cuda"
        reader = partial(Reader, blocks=RING_BLOCKS if on_gpu else CPU_RING_BLOCKS, pin=on_gpu)
        self._session = LoadSession(virtual, device, reader, trace, model_config.dtype, progress, entry)
        return self._session

    def _begun(self, session: LoadSession, spellings: Sequence[str]) -> LoadSession:
        if session.cached is not None:
            _warn_of_unmeasured(session.cached.unmeasured_inputs)
        session.begin(spellings)
        return session

    def _streamed(self, session: LoadSession, model: torch.nn.Module) -> Generator[tuple[str, torch.Tensor]]:
        started = time.perf_counter()
        try:
            for self._placing, tensor in session.tensors():
                yield self._placing, tensor
            session.finish()
        finally:
            session.close()
        for more in getattr(model, "secondary_weights", ()):
            yield from self._get_weights_iterator(more)
        seconds = max(time.perf_counter() - started, 1e-9)
        stats = session.pipeline.stats
        for reason in (stats.fallback_reason, stats.unpinned_reason):
            if reason:
                logger.warning("sparkd: %s", reason)
        logger.info(
            "sparkd: %d units, %.2f GiB read from the %s in %.2f s = %.2f GB/s%s, of which %.2f s waited for the disk.",
            session.pipeline.units_total,
            stats.bytes_read / 2**30,
            "checkpoint" if session.cached is None else "quantized cache",
            seconds,
            stats.bytes_read / seconds / 1e9,
            " past the page cache" if stats.direct else "",
            stats.waited_s,
        )
        session.progress.done(stats.bytes_read, stats.direct)


def _compile_kernels(forms: Collection[Format], device: torch.device) -> None:
    """Run each format's quantizer once, in a separate thread. A failure occurs again at the first unit."""

    def run() -> None:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)), contextlib.suppress(RuntimeError):
            weight = torch.zeros(2, 128, 2048, dtype=torch.bfloat16, device=device)
            largest = amax_each(weight)
            for form in forms:
                shared = {"global_scale": global_scale(largest)} if form.family.has_divisor else {}
                quantizer(form).quantize(weight, **shared)

    threading.Thread(target=run, name="stream-compile", daemon=True).start()


def _warn_of_unmeasured(count: int) -> None:
    if count:
        logger.warning("sparkd: %d modules in nvfp4-a4 have no measured input: they are less accurate. %s", count, CURE)


@contextlib.contextmanager
def _young_garbage_only() -> Iterator[None]:
    """Let the garbage collector look only at objects that the load creates.

    vLLM and torch are a million objects, and a load creates enough for several full collections: 1.3 of the 2.6 s that it took to ask
    9,000 tensors where they go.
    """
    ours = gc.get_freeze_count() == 0
    if ours:
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()


def _mismatch(virtual: VirtualCheckpoint, name: str, model: str, error: BaseException) -> CheckpointError:
    """The error for the operator in place of `error`, which came up while the class `model` was given the tensor `name`."""
    ref = source_of(virtual, name)
    message = re.split(r"(?<=\.)\s|\n", str(error), maxsplit=1)[0][:_TEXT].rstrip(".")
    reason = type(error).__name__ + (f": {message}" if message else "")
    if ref is None:
        return CheckpointError(f"vLLM's {model} does not take it ({reason})", tensor=name or None, cure=ANOTHER_MODEL)
    shape = f"{ref.dtype} of shape {list(ref.shape)}"
    cure = ANOTHER_MODEL + _QUANTIZED if _NO_PLACE in message and name != ref.name else ANOTHER_MODEL
    return CheckpointError(f"vLLM's {model} does not take it as {shape} ({reason})", file=ref.path, tensor=ref.name, cure=cure)


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host has no memory left; many libraries raise a RuntimeError for that."""
    is_ours = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_ours or (isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None)


def _ended(error: BaseException) -> str:
    """The message for the operator about a load that ended for another reason than its checkpoint."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "The load was ended from outside."
    message = str(error).partition("\n")[0].rstrip(". ")
    if _is_out_of_memory(error):
        reason = message or type(error).__name__
        return f"The memory was used up while the weights were loaded ({reason}). Free some, or choose a smaller format."
    return f"The load ended: {type(error).__name__}" + (f": {message}." if message else ".")
