"""What asks vLLM and torch, where there is no GPU: of which device, and what vLLM answers of each kind of attention."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparkd.capacity.estimate import BLOCK_TOKENS
from sparkd.capacity.kv_cache import Serving
from sparkd.checkpoint.shape import Attention
from sparkd.errors import MissingSymbol
from tests.support.late import Late
from tests.support.waiting import HUNG_S
from workers.kv.arithmetic import CacheCosts
from workers.kv.memory import MemoryReading
from workers.kv.memory_floor import Floor
from workers.kv.sizing import RanOut
from workers.kv.start_gate import GATE
from workers.vllm.kv.costs import need_of, weight_bits

cpu, cuda = Late("workers.vllm.kv.cpu"), Late("workers.vllm.kv.cuda")
multimodal = Late("vllm.config.multimodal")
specs_of = Late("tests.workers.vllm.kv.vllm_specs")
GIB = 2**30
# Bytes free and reserved, of which allocated: of each device.
FREE, RESERVED, ALLOCATED = (60 * GIB, 7 * GIB), (9 * GIB, 3 * GIB), (8 * GIB, GIB)


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a worker whose device is the second."""

    def index(device: Any = None) -> int:
        return 0 if device is None else torch.device(device).index  # a thread that has chosen none has device 0

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (FREE[index(device)], 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: RESERVED[index(device)])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: ALLOCATED[index(device)])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(is_integrated=False))
    return cuda.CudaRehearsal(SimpleNamespace(device=torch.device("cuda:1")))  # type: ignore[arg-type]


def test_a_rank_reads_its_own_device_on_any_thread(rehearsal):
    assert (rehearsal.read().room, rehearsal.idle(), rehearsal.taken() >> 30) == (7 * GIB, 2 * GIB, 3)
    seen: list[MemoryReading] = []
    ended = threading.Event()

    def under(reading: MemoryReading) -> None:
        seen.append(reading)
        ended.set()

    with Floor(rehearsal.read, 8 * GIB, under):
        assert ended.wait(HUNG_S), "device 0 has more than that"
    assert seen[0].room == 7 * GIB


def test_a_batchs_peak_counts_from_where_its_model_began(rehearsal, monkeypatch):
    allocated, resets = iter([6 * GIB, 7 * GIB]), []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: next(allocated))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: 10 * GIB)
    rehearsal.mark()
    rehearsal.mark()  # of its sampler
    assert (rehearsal.taken_by_batch(), len(resets)) == (4 * GIB, 1)


@pytest.mark.parametrize(("images", "ran"), [(True, ["images", "prefill", "decoding"]), (False, ["prefill", "decoding"])])
def test_the_largest_batches_run_once_more_on_the_real_cache_and_nothing_is_given_back(rehearsal, monkeypatch, images, ran):
    did: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_args: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: did.append("empty"))
    monkeypatch.setattr("workers.vllm.kv.cuda.largest_prefill", lambda _runner: did.append("prefill"))
    monkeypatch.setattr("workers.vllm.kv.cuda.all_decoding", lambda _runner: did.append("decoding"))
    runner = SimpleNamespace(supports_mm_inputs=images, profile_run=lambda: did.append("images"))
    rehearsal._worker.model_runner, rehearsal._worker.vllm_config = runner, None
    rehearsal.keep()
    assert did == ran


@pytest.mark.parametrize("integrated", [True, False])
def test_a_driver_that_hangs_does_not_blind_the_floor_of_shared_memory(rehearsal, monkeypatch, integrated):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(is_integrated=integrated))
    monkeypatch.setattr("workers.vllm.kv.cuda.host", lambda: MemoryReading(64 * GIB, 40 * GIB, 7 * GIB, 0))
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (asked.append(device), (7 * GIB, 80 * GIB))[1])
    assert rehearsal.watch().room == (40 if integrated else 7) * GIB
    assert len(asked) == (not integrated)


def test_the_rehearsal_has_its_order(rehearsal, monkeypatch):
    did: list[str] = []

    def note(what: str, answer: Any = None) -> Any:
        return lambda *_args, **_named: (did.append(what), answer)[1]

    @contextlib.contextmanager
    def minimal(_runner: Any) -> Any:
        did.append("minimal cache")
        yield
        did.append("torn down")

    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_args: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_args: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", note("empty"))
    monkeypatch.setattr("workers.vllm.kv.cuda.folders_of", lambda _config: ["/m"])
    monkeypatch.setattr("workers.vllm.kv.cuda.forget_files", note("evict"))
    monkeypatch.setattr("workers.vllm.kv.cuda.give_back", note("trim"))
    monkeypatch.setattr("workers.vllm.kv.cuda.minimal_cache", minimal)
    monkeypatch.setattr("workers.vllm.kv.cuda.largest_prefill", note("prefill", 1.0))
    monkeypatch.setattr("workers.vllm.kv.cuda.all_decoding", note("decoding", 1.0))
    monkeypatch.setattr("workers.vllm.kv.cuda.graphs_of", note("graphs", 3 * GIB))
    monkeypatch.setattr("vllm.model_executor.warmup.kernel_warmup.kernel_warmup", note("kernels"))
    runner = SimpleNamespace(profile_run=note("profile"), model_memory_usage=9 * GIB, max_num_tokens=8192, max_num_reqs=4)
    runner.scheduler_config = SimpleNamespace(max_num_batched_tokens=8192, disable_chunked_mm_input=False)
    rehearsal._worker.model_runner, rehearsal._worker.vllm_config = runner, None

    demand = rehearsal.rehearse(1.0)

    settle = ["evict", "trim", "empty"]
    compiled = ["evict", "profile", *settle]
    assert did == [*compiled, "profile", "minimal cache", "kernels", "prefill", "decoding", "torn down", *settle, "graphs", *settle]
    assert (demand.graphs, demand.peak, demand.reusable, demand.weights) == (3 * GIB, 4 * GIB, 2 * GIB, 9 * GIB)


@pytest.mark.parametrize(("images", "gib"), [(3.0, 3), (None, 0)])
@pytest.mark.parametrize("integrated", [False, True])
def test_what_decodes_images_has_its_part_of_the_device(monkeypatch, rehearsal, images, gib, integrated):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(is_integrated=integrated))
    monkeypatch.setattr("workers.vllm.kv.cuda.host", lambda: MemoryReading(64 * GIB, 40 * GIB, 7 * GIB, 0))
    worker = object.__new__(cuda.SparkWorker)
    worker.parallel_config = SimpleNamespace(_api_process_count=1)  # type: ignore[assignment]
    config = None if images is None else multimodal.MultiModalConfig(mm_ipc_gpu_memory_gb=images)
    worker.model_config = SimpleNamespace(multimodal_config=config)  # type: ignore[assignment]
    worker._rehearsal = rehearsal
    worker._sizing = SimpleNamespace(determine=lambda _stock: rehearsal.read().room)  # type: ignore[assignment]
    assert worker.determine_available_memory() == (7 - gib) * GIB == worker.available_kv_cache_memory_bytes


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried"), RuntimeError("CUDA out of memory occurred when")])
def test_a_device_that_refuses_memory_is_known_by_vllms_own_error_too(rehearsal, monkeypatch, error):
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_args: None)
    monkeypatch.setattr("workers.vllm.kv.cuda.folders_of", lambda _config: [])

    def profile_run() -> None:
        raise error

    rehearsal._worker.model_runner, rehearsal._worker.vllm_config = SimpleNamespace(profile_run=profile_run), None
    with pytest.raises(RanOut, match=r"CUDA out of memory"):
        rehearsal.warm()
    error = ValueError("another")
    with pytest.raises(ValueError, match="another"):
        rehearsal.warm()


@pytest.mark.parametrize(
    ("method", "quantize", "bits"),
    [
        (None, None, 16),
        ("spark", "fp8", 8),
        ("fp8", None, 8),
        ("spark", {"default": "nvfp4", "layers": {"lm_head": "fp8"}}, 4),
        ("awq", None, 4),
    ],
)
def test_how_wide_the_weights_are_said_to_be(method, quantize, bits):
    config = SimpleNamespace(
        model_config=SimpleNamespace(quantization=method),
        load_config=SimpleNamespace(model_loader_extra_config={} if quantize is None else {"quantize": quantize}),
    )
    assert weight_bits(config) == bits


def test_the_way_back_to_vllms_own_sizing_counts_with_the_original_utilization(monkeypatch):
    monkeypatch.setattr(cuda.Worker, "determine_available_memory", lambda self: self.requested_memory - 30 * GIB)
    monkeypatch.setattr(cpu.CPUWorker, "determine_available_memory", lambda self: self.requested_cpu_memory - 30 * GIB)
    cache = SimpleNamespace(gpu_memory_utilization=0.5, kv_cache_memory_bytes=None)
    worker = object.__new__(cuda.SparkWorker)
    worker.init_snapshot = SimpleNamespace(total_memory=80 * GIB)  # type: ignore[assignment]
    worker.cache_config = cache  # type: ignore[assignment]
    assert [worker._stock(None), worker._stock(GIB)] == [10 * GIB, GIB]
    host = object.__new__(cpu.SparkCPUWorker)
    host.cache_config = cache  # type: ignore[assignment]
    host.requested_cpu_memory = int(80 * GIB * GATE)
    assert host._stock(None) / GIB == pytest.approx(10, abs=0.001)


def test_ranks_of_one_host_share_its_memory():
    made = cpu.CpuMemory(SimpleNamespace(parallel_config=SimpleNamespace(local_world_size=4)))
    assert made.read().sharers == 4
    made.meet(lambda mine: [mine, "another host's", mine])
    assert made.read().sharers == 2


def without_group(_mine: Any) -> Any:
    raise MissingSymbol("it is missing", symbol="get_world_group")


def test_a_release_without_a_group_of_ranks_is_left_to_the_sizing():
    made = cpu.CpuMemory(SimpleNamespace(parallel_config=SimpleNamespace(local_world_size=4)))
    made.meet(without_group)
    assert made.read().sharers == 4


FULL, WINDOW = Attention(8, 128, 128), Attention(8, 128, 128, window=1024)
STATE = specs_of.RecurrentState(8192, 3, 32, 128, 128, key_heads=16, matrix_dtype="float32")
LENGTH = 65_536
Layers = list[Attention | specs_of.RecurrentState]
SHAPES: dict[str, Layers] = {
    "full": [FULL] * 8,
    "window": [FULL, *[WINDOW] * 5] * 2,
    "window alone": [WINDOW] * 8,
    "hybrid": [STATE, STATE, STATE, FULL] * 2,
    "states alone": [STATE] * 8,
}


def need(layers: Layers, max_model_len: int, monkeypatch: pytest.MonkeyPatch) -> CacheCosts:
    """By vLLM's own counting, as the worker asks it."""
    serving = Serving(max_model_len, max_num_batched_tokens=2048)
    config = specs_of.vllm_config(serving)
    config.cache_config.block_size = BLOCK_TOKENS["cuda"]
    states = [one for one in layers if isinstance(one, specs_of.RecurrentState)]
    attentions = [one for one in layers if isinstance(one, Attention)]
    if states and attentions:
        specs_of.aligned(config, attentions[0], states[0], serving, monkeypatch)
    block, padded = config.cache_config.block_size, config.cache_config.mamba_page_size_padded
    specs = {
        f"layers.{number}": specs_of.state_spec(one, serving, block, padded)
        if isinstance(one, specs_of.RecurrentState)
        else specs_of.attention_spec(one, serving, block)
        for number, one in enumerate(layers)
    }
    found = need_of(config, specs)
    assert found is not None
    assert config.model_config.max_model_len == max_model_len, "what it asks of another length is of a copy"
    return found


@pytest.mark.parametrize("kind", SHAPES)
def test_a_request_of_fewer_tokens_is_what_vllm_takes_for_it(kind, monkeypatch):
    layers = SHAPES[kind]
    whole = need(layers, LENGTH, monkeypatch)
    taken = {tokens: whole.request(tokens) for tokens in (512, 8192, 16_384, LENGTH)}
    assert taken == {tokens: need(layers, tokens, monkeypatch).per_request for tokens in taken}
    shares = {tokens: round(bytes_ / whole.per_request, 3) for tokens, bytes_ in taken.items()}
    if kind == "full":
        assert shares[8192] == 0.125
    else:
        assert shares[8192] > 0.125, "windows and states do not shrink with it"
