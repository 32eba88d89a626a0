"""That sparkd's formulas for the architectures it calls known are vLLM's own numbers: the cache to the byte, the weights to half a percent.

Real vLLM answers, on the meta device, as for a Spark.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from sparkd.capacity.kv_cache import Serving, kv_layout
from sparkd.capacity.weights import inventory
from sparkd.inquiry.model_answers import SPARK, ModelAnswer, ModelQuestion
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
OWN_CODE = ("its own", 1)
CASES = [(name, 1) for name in FIXTURES] + [(name, 2) for name in SPLIT]


def test_each_known_architecture_is_held_against_vllm() -> None:
    assert FIXTURES.keys() == CHECKED


def questions(_folder: Path) -> dict[tuple[str, int], ModelQuestion]:
    # The source of one of them left its type out.
    config = {name: {"model_type": "mistral"} | config_of(fixture) | {"architectures": [name]} for name, fixture in FIXTURES.items()}
    published = {
        (name, ranks): ModelQuestion(files={"config.json": json.dumps(config[name]).encode()}, tensor_parallel=ranks, platform=SPARK)
        for name, ranks in CASES
    }
    own_code = {"model_type": "nobodys", "architectures": ["NobodysForCausalLM"], "auto_map": {"AutoConfig": "its.Config"}}
    blocks = {
        (f"{name} --block-size", 1): ModelQuestion(
            files={"config.json": json.dumps(config[name]).encode()}, args=("--block-size", str(BLOCK)), platform=SPARK
        )
        for name in FIXTURES
    }
    return {**published, OWN_CODE: ModelQuestion(files={"config.json": json.dumps(own_code).encode()}, platform=SPARK), **blocks}


@pytest.fixture(scope="module")
def answers(vllm_answers: VllmAnswers) -> Mapping[tuple[str, int], ModelAnswer | None]:
    return vllm_answers.answers[__name__]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_cache_and_weights_are_vllms(answers: Mapping[tuple[str, int], ModelAnswer | None], name: str, ranks: int) -> None:
    answer = answers[name, ranks]
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FIXTURES)
def test_blocks_of_another_length_are_vllms(answers: Mapping[tuple[str, int], ModelAnswer | None], name: str) -> None:
    answer = answers[f"{name} --block-size", 1]
    assert answer is not None and answer.refusal is None, answer
    layout = kv_layout(shape_of(checkpoint_of(FIXTURES[name]).config), Serving(1, block_tokens=BLOCK))
    assert layout.block_bytes == answer.stages[0].block_bytes
    assert all(layout.cost(length).per_request == size for length, size in answer.stages[0].requests)


def test_a_model_with_code_of_its_own_is_not_refused_for_it(answers: Mapping[tuple[str, int], ModelAnswer | None]) -> None:
    """No question runs that code, so nothing is known of the model."""
    answer = answers[OWN_CODE]
    assert answer is not None and answer.refusal is not None and not answer.refusal.certain, answer
