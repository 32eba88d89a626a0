"""What vLLM's answer puts in place of formulas: the cache's layout, the weights, a refusal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparkd.capacity.evidence import Exact, exact_of
from sparkd.capacity.kv_cache import KvLayout, Serving
from sparkd.vllm.ask.answers import LayerCache, ModelAnswer, ModelRefusal, Stage
from sparkd.vllm.unaccounted_args import CACHE, OTHER, WEIGHTS

FULL = LayerCache("full", "FullAttentionSpec", 16, 1000, 62.5)
WINDOW = LayerCache("window", "SlidingWindowSpec", 16, 1000, 62.5, window=128)
STATE = LayerCache("state", "MambaSpec", 400, 1000, state_bytes=900)
SERVING = Serving(4096, max_num_batched_tokens=64)
LAYOUT = KvLayout(0, (), SERVING)


def answer(*layers: LayerCache, blocks: int = 0, refusal: ModelRefusal | None = None, groups: bool = True) -> ModelAnswer:
    """blocks: that a request of one token takes."""
    stage = Stage(layers, (), 900, 100, 1000, ((1, 1000 * blocks),))
    pool = tuple({"spec": layer.spec, "block": layer.block, "page_bytes": 1000, "layers": [layer.name]} for layer in layers)
    return ModelAnswer("0.32.0", "cuda:12.1", True, 1.0, refusal, (stage,), {}, pool if groups else ())


def test_the_layout_is_that_of_its_groups() -> None:
    exact = exact_of(answer(FULL, WINDOW, blocks=3), SERVING, same_format=True)
    assert exact is not None and exact.layout is not None and exact.weight_bytes == 1000
    # 4,096 tokens in whole blocks; a window and two batches beyond it, and a block that it begins in.
    assert exact.layout.cost(4096).blocks == 256 + (128 - 1 + 2 * 64 + 15) // 16 + 1
    assert exact.layout.block_bytes == 1000


@pytest.mark.parametrize("each", [1, 2, 3])
def test_a_release_decides_how_many_blocks_a_state_takes(each: int) -> None:
    exact = exact_of(answer(STATE, FULL, blocks=each + 1), SERVING, same_format=True)
    assert exact is not None and exact.layout is not None
    assert exact.layout.cost(1600).blocks == each + 100


@pytest.mark.parametrize(("blocks", "batches"), [(1 + 16 + 2, 2), (1 + 12 + 2, 1), (1 + 12 + 3, None)])
def test_vllm_decides_how_many_batches_are_in_flight(blocks: int, batches: int | None) -> None:
    """A pooling model has one; a window keeps what each of them may add. Sizes that no number of them gives are no layout."""
    plain = answer(WINDOW, blocks=2)
    stage = replace(plain.stages[0], requests=((4096, 1000 * (blocks - 2)),))
    exact = exact_of(replace(plain, stages=(stage,), facts={"max_num_batched_tokens": 64}), SERVING, same_format=True)
    assert exact is not None
    assert batches == (None if exact.layout is None else exact.layout.serving.batches_in_flight)


@pytest.mark.parametrize(
    ("exact", "settled"),
    [
        (Exact(), {()}),
        (Exact(KvLayout(0, (), SERVING)), {(), (CACHE,)}),
        (Exact(KvLayout(0, (), SERVING), 1000), {(), (CACHE,), (WEIGHTS, CACHE)}),
    ],
)
def test_an_answer_settles_what_it_has(exact: Exact, settled: set[tuple[str, ...]]) -> None:
    asked = [(), (CACHE,), (WEIGHTS, CACHE), (CACHE, OTHER)]
    assert {unknown for unknown in asked if exact.settled.issuperset(unknown)} == settled


def test_a_model_that_keeps_nothing_has_no_cache() -> None:
    exact = exact_of(answer(), SERVING, same_format=True)
    assert exact is not None and exact.layout is not None and exact.layout.cost(4096).per_token == 0


def test_a_release_without_groups_says_nothing_of_the_cache() -> None:
    exact = exact_of(answer(FULL, groups=False), SERVING, same_format=False)
    assert exact == Exact()


@pytest.mark.parametrize(("certain", "refusal"), [(True, "9 heads are odd"), (False, None)])
def test_only_vllms_own_word_refuses(certain: bool, refusal: str | None) -> None:
    exact = exact_of(answer(refusal=ModelRefusal("config", "ValueError", "9 heads are odd.", certain)), SERVING, same_format=True)
    assert (exact.refusal if exact is not None else None) == refusal


@pytest.mark.parametrize("step", ["cache", "sizes"])
def test_a_cache_that_vllm_could_not_count_leaves_the_weights(step: str) -> None:
    stopped = answer(FULL, refusal=ModelRefusal(step, "KeyError", "page", False), groups=False)
    exact = exact_of(stopped, SERVING, same_format=True)
    assert exact == Exact(weight_bytes=1000)
    assert exact_of(replace(stopped, stages=()), SERVING, same_format=True) is None
    assert exact.guesses(()) == {CACHE}


@pytest.mark.parametrize(
    ("exact", "unknown", "guesses"),
    [
        (Exact(LAYOUT, 1000), (), ()),
        (Exact(LAYOUT), (), (WEIGHTS,)),
        (Exact(None, 1000), (WEIGHTS, CACHE), (CACHE,)),
        (Exact(), (), (WEIGHTS, CACHE)),
        (Exact(LAYOUT, 1000), (OTHER,), (WEIGHTS, CACHE)),
    ],
)
def test_what_vllm_did_not_answer_is_a_guess(exact: Exact, unknown: tuple[str, ...], guesses: tuple[str, ...]) -> None:
    assert exact.guesses(unknown) == set(guesses)
