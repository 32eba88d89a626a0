from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sparkd.errors import MissingSymbol
from tests.support.late import Late
from workers.vllm.kv.rehearsal import all_decoding, encoder_items, graphs_of, minimal_cache, profiled, require, smaller_batches
from workers.vllm.symbols import TABLE


@pytest.fixture(autouse=True, scope="module")
def vllm() -> None:
    """vLLM is imported before a test replaces a part of it."""
    assert Late("vllm.multimodal.encoder_budget").MultiModalBudget
    assert Late("vllm.model_executor.warmup.kernel_warmup").kernel_warmup


@pytest.mark.parametrize(("scale", "tokens"), [(0.5, 4096), (0.01, 256)])
def test_a_smaller_batch_is_the_runners_and_that_of_warm_ups_that_ask_the_scheduler(scale, tokens):
    """flashinfer_autotune and deep_gemm_warmup run scheduler_config.max_num_batched_tokens (vllm/model_executor/warmup)."""
    runner = Runner(True, 0, 0, 0)
    with pytest.raises(ZeroDivisionError), smaller_batches(runner, scale):
        assert (runner.max_num_tokens, runner.scheduler_config.max_num_batched_tokens) == (tokens, tokens)
        raise ZeroDivisionError
    assert (runner.max_num_tokens, runner.scheduler_config.max_num_batched_tokens) == (8192, 8192)


@pytest.mark.parametrize(
    ("v2", "lacks"),
    [(False, "kernel_warmup"), (False, "_dummy_run"), (True, "_dummy_sampler_run"), (True, "_teardown_profiling_state"), (True, "")],
)
def test_what_a_rehearsal_would_lack_on_any_rank_is_said_before_it(monkeypatch, v2, lacks):
    methods = ["_dummy_run", "_dummy_sampler_run", "profile_cudagraph_memory"]
    methods += ["initialize_kv_cache"] if v2 else ["_init_minimal_kv_cache_for_profiling", "_cleanup_profiling_kv_cache"]
    runner = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=False), **{name: print for name in methods if name != lacks})
    if v2:
        runner.cudagraph_manager = None
    if lacks in TABLE:
        (home,) = TABLE[lacks].homes
        monkeypatch.setitem(sys.modules, home, ModuleType(home))
    with pytest.raises(MissingSymbol, match=lacks) if lacks else contextlib.nullcontext():
        require(runner)


ITEM_TOKENS, ITEMS = 576, 14


class Budget:
    """As vLLM's MultiModalBudget counts: V1's from the start, V2's from the configuration of the moment."""

    mm_max_toks_per_item = {"image": ITEM_TOKENS, "audio": 0}

    def __init__(self, config: Any, _registry: Any = None, *, enable_cache: bool = True) -> None:
        assert not enable_cache
        budget = min(max(config.max_num_encoder_input_tokens, ITEM_TOKENS), max(config.encoder_cache_size, ITEM_TOKENS))
        self.mm_max_items_per_batch = {"image": max(1, budget // ITEM_TOKENS), "audio": 0}

    def get_encoder_budget(self) -> int:
        return 1

    def get_modality_with_max_tokens(self) -> str:
        return "image"


class Runner:
    """What a profile run takes: of each image, of each token, and what images leave for the rest to begin on."""

    supports_mm_inputs = True
    max_num_tokens, max_num_reqs = 8192, 256

    def __init__(self, v2: bool, item: int, token: int, kept: int) -> None:
        self.scheduler_config = self.vllm_config = SimpleNamespace(
            max_num_batched_tokens=8192,
            max_num_encoder_input_tokens=8192,
            encoder_cache_size=8192,
            max_num_seqs=256,
            disable_chunked_mm_input=False,
        )
        self.model_config = SimpleNamespace(multimodal_config=SimpleNamespace(skip_mm_profiling=False))
        self.mm_registry = None
        self.v2 = v2
        if not v2:
            self.mm_budget = Budget(self.scheduler_config, enable_cache=False)
        self.each = item, token, kept
        self.ran: list[tuple[int, int]] = []
        self.took = 0

    def profile_run(self) -> None:
        budget = Budget(self.scheduler_config, enable_cache=False) if self.v2 else self.mm_budget
        items = 0 if self.model_config.multimodal_config.skip_mm_profiling else budget.mm_max_items_per_batch["image"]
        item, token, kept = self.each
        self.ran.append((items, self.max_num_tokens))
        self.took = max(items * item, items * kept + self.max_num_tokens * token)

    def peak(self, run: Callable[[], Any]) -> int:
        run()
        return self.took


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.25, 0.01])
@pytest.mark.parametrize(("item", "token", "kept"), [(900_000, 100, 1000), (1000, 900, 1000), (50_000, 100, 40_000)])
def test_encoders_run_fewer_items_too_and_their_part_is_made_whole(monkeypatch, v2, scale, item, token, kept):
    monkeypatch.setattr("vllm.multimodal.encoder_budget.MultiModalBudget", Budget)
    runner = Runner(v2, item, token, kept)
    before = repr(vars(runner.scheduler_config))
    found = profiled(runner, scale, runner.peak)
    whole = Runner(v2, item, token, kept)
    whole.profile_run()
    items, tokens = runner.ran[0]
    assert whole.ran == [(ITEMS, 8192)]
    assert (items, tokens) == (max(1, int(ITEMS * scale)), max(256, int(8192 * scale)))
    assert len(runner.ran) == (1 if scale == 1 else 2)
    # Never less than it is, and not much more: what is in the peak of items and not of tokens may be counted twice.
    assert whole.took <= found + 2 <= 2.1 * whole.took + 2
    assert (repr(vars(runner.scheduler_config)), runner.max_num_tokens) == (before, 8192)
    assert runner.model_config.multimodal_config.skip_mm_profiling is False
    if not v2:
        assert runner.mm_budget.mm_max_items_per_batch == {"image": ITEMS, "audio": 0}


@pytest.mark.parametrize("kind", ["text", "skipped", "no encoder"])
def test_a_model_without_encoders_is_profiled_once(monkeypatch, kind):
    runner = Runner(False, 0, 100, 0)
    runner.supports_mm_inputs = kind != "text"
    runner.model_config.multimodal_config.skip_mm_profiling = kind == "skipped"
    if kind == "no encoder":
        runner.mm_budget.mm_max_toks_per_item = {}
    assert encoder_items(runner) == 0
    assert profiled(runner, 0.25, runner.peak) == 819_200
    assert len(runner.ran) == 1


@pytest.mark.parametrize(("whole", "images", "tokens"), [(True, True, 8192), (True, False, 256), (False, True, 256)])
def test_an_item_that_has_to_be_in_one_batch_is_not_refused_for_a_smaller_one(whole, images, tokens):
    """compute_mm_encoder_budget raises ValueError where an item has more tokens than max_num_batched_tokens."""
    runner = Runner(True, 0, 0, 0)
    runner.scheduler_config.disable_chunked_mm_input, runner.supports_mm_inputs = whole, images
    with smaller_batches(runner, 0.01):
        assert (runner.max_num_tokens, runner.scheduler_config.max_num_batched_tokens) == (256, tokens)


@pytest.mark.parametrize(("scale", "sequences"), [(0.5, 128), (0.001, 1)])
def test_the_warm_up_of_requests_is_smaller_by_its_sequences(scale, sequences):
    runner = Runner(True, 0, 0, 0)
    with smaller_batches(runner, scale, sequences=True) as share:
        assert runner.scheduler_config.max_num_seqs == sequences
        assert share == sequences / 256
    assert runner.scheduler_config.max_num_seqs == 256


class Decoding:
    """V2 refuses a decode batch that is no multiple of a request's tokens (v1/worker/gpu/model_runner.py)."""

    max_num_tokens, max_num_reqs, max_model_len = 2048, 250, 4096
    cudagraph_manager = None
    is_pooling_model = False

    def __init__(self, each: int) -> None:
        self.decode_query_len = each
        self.ran: list[int] = []
        self.sampled: list[int] = []

    def _dummy_run(self, tokens: int, *, uniform_decode: bool = False, **_more: Any) -> Any:
        assert uniform_decode and tokens % self.decode_query_len == 0 and tokens <= self.max_num_tokens
        self.ran.append(tokens)
        return torch.zeros(tokens + 3, 4), torch.zeros(tokens // self.decode_query_len, 4)  # padded

    def _dummy_sampler_run(self, rows: Any) -> None:
        self.sampled.append(len(rows))


@pytest.mark.parametrize(
    ("each", "scale", "tokens", "share"),
    [(1, 1.0, 250, 1.0), (5, 0.5, 625, 0.5), (9, 1.0, 2043, 1.0), (5, 0.001, 5, 1 / 250), (4000, 1.0, 4000, 1.0)],
)
def test_every_sequence_decodes_with_its_drafts_and_is_sampled(each, scale, tokens, share):
    runner = Decoding(each)
    if each == 4000:
        runner.max_num_tokens = 4096
    assert all_decoding(runner, scale) == pytest.approx(share)
    assert (runner.ran, runner.sampled) == ([tokens], [tokens])


@pytest.mark.parametrize("why", ["pools", "not the last stage", "no text"])
def test_nothing_is_sampled_where_nothing_is(why):
    runner: Any = Decoding(1)
    if why == "pools":
        runner.is_pooling_model = True
    else:
        made = (None, None) if why == "not the last stage" else (torch.tensor([]), torch.tensor([]))
        runner._dummy_run = lambda *_args, **_named: made
    all_decoding(runner)
    assert runner.sampled == []


@pytest.mark.parametrize(("eager", "bytes_"), [(True, 0), (False, 4711)])
def test_graphs_are_counted_wherever_vllm_may_capture_one(eager, bytes_):
    """0.33 captures those of encoders under cudagraph_mode NONE too (v1/worker/gpu/cudagraph_utils.py)."""
    model_config = SimpleNamespace(enforce_eager=eager)
    assert graphs_of(SimpleNamespace(model_config=model_config, profile_cudagraph_memory=lambda: 4711)) == bytes_


class Group:
    """The calls of vLLM's planning: which way, and for how many blocks."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def get_kv_cache_config_from_groups(self, config: Any, groups: Any, blocks: int) -> Any:
        self.asked.append((groups, blocks, config.cache_config.num_gpu_blocks_override))
        return SimpleNamespace(num_blocks=blocks)


@pytest.mark.parametrize("builds", [True, False])
def test_a_small_cache_is_made_and_removed_in_the_way_of_the_release(monkeypatch, builds):
    """0.33 asks a builder of the model or the platform; 0.32 has functions that take bytes."""
    group, block = Group(), 1 << 20
    by_bytes = lambda config, groups, size: group.get_kv_cache_config_from_groups(config, groups, size // block)  # noqa: E731
    release = {
        "get_kv_cache_groups": lambda _config, specs: ("module", *specs),
        "_pool_bytes_per_block": lambda *_: block,
        "get_kv_cache_config_from_groups": by_bytes,
        "_teardown_profiling_state": lambda runner: runner.did.append("torn down"),
        "set_current_vllm_config": lambda _config: contextlib.nullcontext(),
    }
    if builds:
        release |= {
            "get_kv_cache_config_builder": lambda _config: group,
            "get_kv_cache_groups_from_builder": lambda _builder, _config, specs: ("builder", *specs),
            "_pool_bytes_per_block_from_builder": lambda *_: block,
        }
    for module in ("costs", "rehearsal"):
        monkeypatch.setattr(f"workers.vllm.kv.{module}.symbol", release.__getitem__)
    monkeypatch.setattr("workers.vllm.kv.costs.has", release.__contains__)
    cache = SimpleNamespace(num_gpu_blocks_override=3, num_gpu_blocks=None)
    did: list[Any] = []
    runner = SimpleNamespace(
        cudagraph_manager=None,
        cache_config=cache,
        vllm_config=SimpleNamespace(cache_config=cache),
        max_num_reqs=4,
        did=did,
        get_kv_cache_spec=lambda: {"layer": 0},
        initialize_kv_cache=lambda config, is_profiling: did.append((config.num_blocks, is_profiling)),
    )
    with pytest.raises(ZeroDivisionError), minimal_cache(runner):
        assert (did, cache.num_gpu_blocks) == ([(9, True)], 9)
        raise ZeroDivisionError
    assert did[1:] == ["torn down"]
    way = "builder" if builds else "module"
    assert {asked[::2] for asked in group.asked} == {((way, "layer"), None)}, "a number of blocks in the flags does not count"
    assert cache.num_gpu_blocks_override == 3
