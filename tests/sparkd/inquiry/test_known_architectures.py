"""That sparkd's formulas for the architectures it calls known are vLLM's own numbers: the cache to the byte, the weights to half a percent.

Real vLLM answers, on the meta device, as for a Spark: `make test` asks of one model for each kind of layers, `make test-all` of all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from sparkd.capacity.kv_cache import Serving, kv_layout
from sparkd.capacity.weights import inventory
from sparkd.inquiry.model_answers import SPARK, InquiryRuntime, ModelAnswer, ModelQuestion, ask
from sparkd.models.architectures import CHECKED
from sparkd.models.shape import shape_of
from tests.conftest import VllmAnswers
from tests.support.published_headers import checkpoint_of, config_of
from workers.quantization.recipe import QuantizationRecipe

# A published configuration of each. On two ranks too: one for each way in which heads and experts are split.
FIXTURES = {
    "DeepseekV2ForCausalLM": "deepseek-v2-lite",
    "DeepseekV3ForCausalLM": "deepseek-v3",
    "Gemma3ForConditionalGeneration": "gemma-3-27b-it",
    "Gemma4ForConditionalGeneration": "gemma-4-26b-a4b",
    "Glm4MoeForCausalLM": "glm-4.5-air",
    "GptOssForCausalLM": "gpt-oss-20b",
    "LlamaForCausalLM": "llama-3.3-70b-instruct",
    "MistralForCausalLM": "mistral-small-24b-instruct-2501",
    "Qwen3_5ForConditionalGeneration": "qwen3.5-27b",
    "Qwen3_5MoeForConditionalGeneration": "qwen3.5-35b-a3b",
    "Qwen3ForCausalLM": "qwen3-32b",
    "Qwen3MoeForCausalLM": "qwen3-30b-a3b-base",
    "Qwen3NextForCausalLM": "qwen3-next-80b-a3b-instruct",
}
SPLIT = ("DeepseekV2ForCausalLM", "Gemma4ForConditionalGeneration", "GptOssForCausalLM", "Qwen3_5MoeForConditionalGeneration")
BLOCK = 128
CASES = [(name, 1) for name in FIXTURES] + [(name, 2) for name in SPLIT]
# Attention to all tokens, one vector for all heads, windows, and states with experts; two of them over two ranks.
KINDS = [
    ("MistralForCausalLM", 1), ("DeepseekV2ForCausalLM", 2), ("Gemma4ForConditionalGeneration", 1),
    ("Qwen3_5MoeForConditionalGeneration", 2),
]  # fmt: skip
OTHERS = [case for case in CASES if case not in KINDS]


def test_each_known_architecture_is_held_against_vllm() -> None:
    assert FIXTURES.keys() == CHECKED


def question(name: str, ranks: int = 1, *args: str) -> ModelQuestion:
    # The source of one of them left its type out.
    config = {"model_type": "mistral"} | config_of(FIXTURES[name]) | {"architectures": [name]}
    return ModelQuestion(files={"config.json": json.dumps(config).encode()}, tensor_parallel=ranks, args=args, platform=SPARK)


def questions(_folder: Path) -> dict[tuple[str, int], ModelQuestion]:
    return {(name, ranks): question(name, ranks) for name, ranks in KINDS}


Answers = Mapping[tuple[str, int], ModelAnswer | None]


@pytest.fixture(scope="module")
def answers(vllm_answers: VllmAnswers) -> Answers:
    return vllm_answers.answers[__name__]


@pytest.fixture(scope="module")
def other_answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """One more child, for what `make test` does not ask."""
    asked = {(name, ranks): question(name, ranks) for name, ranks in OTHERS}
    asked |= {(f"{name} --block-size", 1): question(name, 1, "--block-size", str(BLOCK)) for name in FIXTURES}
    runtime = InquiryRuntime(None, [tmp_path_factory.mktemp("answers")])
    return dict(zip(asked, ask(list(asked.values()), runtime), strict=True))


@pytest.mark.parametrize(("name", "ranks"), KINDS)
def test_cache_and_weights_are_vllms(answers: Answers, name: str, ranks: int) -> None:
    check_cache_and_weights(answers[name, ranks], name, ranks)


@pytest.mark.rest
@pytest.mark.parametrize(("name", "ranks"), OTHERS)
def test_cache_and_weights_of_the_others_are_vllms(other_answers: Answers, name: str, ranks: int) -> None:
    check_cache_and_weights(other_answers[name, ranks], name, ranks)


def check_cache_and_weights(answer: ModelAnswer | None, name: str, ranks: int) -> None:
    assert answer is not None and answer.refusal is None, answer
    (stage,) = answer.stages
    checkpoint = checkpoint_of(FIXTURES[name])
    shape = replace(shape_of(checkpoint.config), architecture=name)
    layout = kv_layout(shape, Serving(1, tensor_parallel=ranks))
    tokens = sum(layer.token_bytes for layer in stage.layers)
    assert shape.max_len == answer.facts["max_model_len"] and tokens > 0
    # Blocks of a latent attention have as many tokens as its kernels like, which differ between GPUs: within one block.
    for length, size in stage.requests:
        assert abs(layout.cost(length).per_request - size) <= layout.block_bytes * (layout.block_bytes != stage.block_bytes)
    weights = inventory(checkpoint, shape).formatted(QuantizationRecipe.parse("bf16")).weights(ranks).bytes + shape.rotary_bytes
    assert weights == pytest.approx(stage.parameter_bytes + stage.buffer_bytes, rel=0.005)


@pytest.mark.rest
@pytest.mark.parametrize("name", FIXTURES)
def test_blocks_of_another_length_are_vllms(other_answers: Answers, name: str) -> None:
    answer = other_answers[f"{name} --block-size", 1]
    assert answer is not None and answer.refusal is None, answer
    layout = kv_layout(shape_of(checkpoint_of(FIXTURES[name]).config), Serving(1, block_tokens=BLOCK))
    assert layout.block_bytes == answer.stages[0].block_bytes
    assert all(layout.cost(length).per_request == size for length, size in answer.stages[0].requests)
