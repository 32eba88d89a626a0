from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.late import Late
from workers.vllm.kv import encoders, rehearsal
from workers.vllm.kv.rehearsal import all_decoding, profiled, smaller_batches


@pytest.fixture(autouse=True, scope="module")
def vllm() -> None:
    """vLLM is imported before a test replaces a part of it."""
    assert Late("vllm.multimodal.encoder_budget").MultiModalBudget


def test_a_release_is_told_that_a_cache_is_for_profiling_where_it_asks():
    """V2's runner of vLLM 0.32, and of 0.26."""

    def since_0_30(config: Any, is_profiling: bool = False) -> None: ...

    def before(config: Any) -> None: ...

    assert [rehearsal._profiling(one) for one in (since_0_30, before)] == [{"is_profiling": True}, {}]


@pytest.mark.parametrize(("scale", "tokens"), [(0.5, 4096), (0.01, 256)])
def test_a_smaller_batch_is_the_runners_and_that_of_warm_ups_that_ask_the_scheduler(scale, tokens):
    """flashinfer_autotune and deep_gemm_warmup run scheduler_config.max_num_batched_tokens (vllm/model_executor/warmup)."""
    runner = SimpleNamespace(max_num_tokens=8192, max_num_reqs=256, scheduler_config=SimpleNamespace(max_num_batched_tokens=8192))
    with pytest.raises(ZeroDivisionError), smaller_batches(runner, scale):
        assert (runner.max_num_tokens, runner.scheduler_config.max_num_batched_tokens) == (tokens, tokens)
        raise ZeroDivisionError
    assert (runner.max_num_tokens, runner.scheduler_config.max_num_batched_tokens) == (8192, 8192)


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
            max_num_batched_tokens=8192, max_num_encoder_input_tokens=8192, encoder_cache_size=8192, max_num_seqs=256
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


class OlderBudget(Budget):
    """0.26's: it takes no enable_cache, and its V2 never makes one."""

    def __init__(self, config: Any, registry: Any) -> None:
        super().__init__(config, registry, enable_cache=False)
        self.cache = "its cache"


class OlderRunner(Runner):
    """V2 before it profiled encoders: its own run is of text alone."""

    def __init__(self, item: int, token: int, kept: int) -> None:
        super().__init__(True, item, token, kept)
        self.encoder_cache = SimpleNamespace(encoder_outputs={})
        self.model_state = SimpleNamespace(encoder_runner=SimpleNamespace(execute_mm_encoder=self.encode))
        self.mm_registry = SimpleNamespace(get_dummy_mm_inputs=self.made)
        self.encoded = 0

    def made(self, _config: Any, *, mm_counts: dict[str, int], cache: Any) -> Any:
        assert (mm_counts, cache) == ({"image": 1}, "its cache")
        return {"mm_kwargs": {"image": ["the largest image"]}}

    def encode(self, batch: list[tuple[str, Any]]) -> list[torch.Tensor]:
        assert set(batch) == {("image", "the largest image")}
        self.encoded = len(batch)
        return [torch.zeros(1)] * len(batch)

    def profile_run(self) -> None:
        item, token, kept = self.each
        held = len(self.encoder_cache.encoder_outputs)
        self.ran.append((held, self.max_num_tokens))
        self.took = max(self.encoded * item, held * kept + self.max_num_tokens * token)

    def reset_encoder_cache(self) -> None:
        self.encoder_cache.encoder_outputs.clear()


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_where_v2_profiles_no_encoders_they_are_rehearsed_all_the_same(monkeypatch, scale):
    """Before: a cache was sized as if no image ever came, and the first ones met what was left."""
    monkeypatch.setattr("vllm.multimodal.encoder_budget.MultiModalBudget", OlderBudget)
    runner = OlderRunner(900_000, 100, 1000)
    found = profiled(runner, scale, runner.peak)
    assert runner.ran[0] == (max(1, int(ITEMS * scale)), max(256, int(8192 * scale)))
    assert ITEMS * 900_000 <= found + 2 <= 2.1 * ITEMS * 900_000
    assert runner.encoder_cache.encoder_outputs == {}


def test_a_processor_that_makes_no_item_is_told_and_the_rest_is_rehearsed(monkeypatch, caplog):
    monkeypatch.setattr("vllm.multimodal.encoder_budget.MultiModalBudget", OlderBudget)
    monkeypatch.setattr("workers.vllm.kv.encoders.logger.propagate", True)
    runner = OlderRunner(900_000, 100, 1000)
    runner.mm_registry.get_dummy_mm_inputs = lambda *_, **__: {}
    assert profiled(runner, 1.0, runner.peak) == 819_200
    assert "image" in caplog.text and "(KeyError)" in caplog.text


def test_memory_that_is_refused_to_an_item_is_no_processors_fault(monkeypatch):
    monkeypatch.setattr("vllm.multimodal.encoder_budget.MultiModalBudget", OlderBudget)
    runner = OlderRunner(900_000, 100, 1000)

    def refused(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    runner.mm_registry.get_dummy_mm_inputs = refused
    with pytest.raises(torch.OutOfMemoryError):
        profiled(runner, 1.0, runner.peak)


def test_a_budget_is_made_once_for_a_run(monkeypatch):
    made = []

    class Counted(OlderBudget):
        def __init__(self, config: Any, registry: Any) -> None:
            made.append(self)
            super().__init__(config, registry)

    monkeypatch.setattr("vllm.multimodal.encoder_budget.MultiModalBudget", Counted)
    runner = OlderRunner(900_000, 100, 1000)
    profiled(runner, 1.0, runner.peak)
    assert len(made) == 1


def test_memory_that_is_refused_to_an_encoder_leaves_no_item_behind(monkeypatch):
    monkeypatch.setattr("vllm.multimodal.encoder_budget.MultiModalBudget", OlderBudget)
    runner = OlderRunner(900_000, 100, 1000)
    runner.profile_run = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        profiled(runner, 1.0, runner.peak)
    assert runner.encoder_cache.encoder_outputs == {}


@pytest.mark.parametrize("kind", ["text", "skipped", "no encoder"])
def test_a_model_without_encoders_is_profiled_once(monkeypatch, kind):
    runner = Runner(False, 0, 100, 0)
    runner.supports_mm_inputs = kind != "text"
    runner.model_config.multimodal_config.skip_mm_profiling = kind == "skipped"
    if kind == "no encoder":
        runner.mm_budget.mm_max_toks_per_item = {}
    assert encoders.items(runner) == 0
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
        runner.pooling_runner = object()
    else:
        made = (None, None) if why == "not the last stage" else (torch.tensor([]), torch.tensor([]))
        runner._dummy_run = lambda *_args, **_named: made
    all_decoding(runner)
    assert runner.sampled == []
