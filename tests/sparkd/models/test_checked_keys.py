"""Which configurations of a checked architecture a formula may be called known for: those whose every size it reads."""

from __future__ import annotations

from typing import Any

import pytest

from sparkd.models.architectures import is_checked
from sparkd.models.checked_keys import KEYS
from sparkd.models.shape import shape_of
from tests.sparkd.inquiry.test_known_architectures import FIXTURES
from tests.support.checkpoints import dense, mixture
from tests.support.published_headers import config_of


def without(place: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {key: without(value, names) if isinstance(value, dict) else value for key, value in place.items() if key not in names}


def published(architecture: str) -> dict[str, Any]:
    return config_of(FIXTURES[architecture]) | {"architectures": [architecture]}


def test_the_configurations_that_the_tests_compare_with_vllm_are_read_whole() -> None:
    shapes = {architecture: shape_of(published(architecture)) for architecture in KEYS}
    assert shapes and {name: shape.unread for name, shape in shapes.items() if shape.unread or not is_checked(shape)} == {}


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "DeepseekV3ForCausalLM", "Qwen3_5MoeForConditionalGeneration"])
def test_a_size_that_the_class_would_fill_in_is_no_known_one(architecture: str) -> None:
    config = published(architecture)
    text = config.get("text_config", config)
    for key in KEYS[architecture].needs:
        lacking = without(text, key.split("|"))
        shape = shape_of({**config, "text_config": lacking} if "text_config" in config else lacking)
        assert not is_checked(shape), key


@pytest.mark.parametrize(
    "more",
    [
        {"num_key_value_heads": [4, 4, 2, 4]},
        {"a_key_of_tomorrow": 7},
        {"rope_scaling": {"rope_type": "tomorrows", "factor": 2.0}},
        {"audio_config": {"layers": 3}},
    ],
)
def test_a_key_that_may_change_a_size_and_is_not_read_makes_a_guess(more: dict[str, Any]) -> None:
    for config in (dense(**more), mixture(**more)):
        assert not is_checked(shape_of(config))


@pytest.mark.parametrize(
    "more",
    [
        {"head_dim": 96},
        {"eos_token_id": [1, 2], "rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_dropout": 0.1, "unsloth_version": "2026.1"},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
)
def test_keys_that_are_read_or_change_no_size_leave_it_known(more: dict[str, Any]) -> None:
    assert is_checked(shape_of(dense(**more))) and is_checked(shape_of(mixture(**more)))
