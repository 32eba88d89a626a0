"""What a configuration says of a model's layers: published ones, each way of writing a pattern down, and what is no model."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.checkpoint.shape import Attention, Shape, shape_of, text_config
from tests.support.checkpoints import dense, mixture
from tests.support.inventories import CONFIGS, published, shape

NAMES = sorted(path.stem for path in CONFIGS.glob("*.json") if not path.stem.endswith(".hf_quant_config"))
# (layers that see all tokens, layers with a window, layers that keep nothing of a token).
MIXED = {
    "gemma-3-27b-it": (10, 52, 0),
    "gemma-4-12b-it-assistant": (0, 0, 4),
    "gemma-4-26b-a4b": (5, 25, 0),
    "gpt-oss-20b": (12, 12, 0),
    "nemotron-3-nano-30b-a3b-bf16": (6, 0, 46),
    "qwen3-next-80b-a3b-instruct": (12, 0, 36),
    "qwen3.5-27b": (16, 0, 48),
}


def kinds(found: Shape) -> tuple[int, int, int]:
    letters = pattern(found)
    return letters.count("A"), letters.count("w"), letters.count("-")


def pattern(found: Shape) -> str:
    """A letter for each layer: all tokens, a window, nothing of a token."""
    return "".join("-" if one is None else "w" if one.window else "A" for one in found.attentions)


def test_a_published_configuration_is_understood() -> None:
    assert {name: kinds(shape(name)) for name in MIXED} == MIXED
    assert len(NAMES) > 20
    for name in NAMES:
        found = shape(name)
        assert sum(kinds(found)) == found.layers, name
        assert (found.experts > 0) == (found.active_experts > 0), name
        assert found.max_len >= 2048 and found.dtype == "bfloat16", name


def test_what_layers_keep_of_a_token() -> None:
    def of(name: str) -> Counter[object]:
        return Counter(shape(name).attentions)

    assert of("deepseek-v3") == {Attention(1, 576, 0, latent=True): 61}
    assert of("llama-3.1-8b") == {Attention(8, 128, 128): 32}
    assert of("gpt-oss-20b") == {Attention(8, 64, 64): 12, Attention(8, 64, 64, window=128): 12}
    assert of("qwen3.5-27b") == {Attention(4, 256, 256): 16, None: 48}


@pytest.mark.parametrize(
    ("more", "letters"),
    [
        ({}, "AAAAAAAA"),
        ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 4}, "wAwAwAwA"),
        ({"sliding_window": 64, "sliding_window_pattern": 4}, "wwwAwwwA"),
        ({"sliding_window": 64, "model_type": "gemma3_text"}, "wwwwwAww"),
        ({"full_attention_interval": 4}, "---A---A"),
        ({"layer_types": ["retention", "mamba"] * 4}, "A-A-A-A-"),
        ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 4, "num_kv_shared_layers": 3}, "wAwAw---"),
        ({"hybrid_override_pattern": "*-*-*E|*E"}, "A-A-A-A-"),
    ],
)
def test_a_pattern_of_layers(more: dict[str, Any], letters: str) -> None:
    assert pattern(shape_of(dense(num_hidden_layers=8, **more))) == letters


def test_the_language_model_is_found_wherever_it_is() -> None:
    inner = dense(tie_word_embeddings=None)

    assert text_config({"text_config": inner}) == inner
    assert text_config({"thinker_config": {"text_config": inner}, "tie_word_embeddings": False})["tie_word_embeddings"] is False
    assert not shape_of({"llm_config": inner, "tie_word_embeddings": False, "architectures": ["X"]}).tied
    assert shape_of({"llm_config": {**inner, "tie_word_embeddings": True}, "tie_word_embeddings": False}).tied
    assert shape_of({"text_config": inner}).architecture == "llama"
    assert shape_of({"text_config": inner, "architectures": ["X", "Y"]}).architecture == "X"


@pytest.mark.parametrize(
    ("more", "length"),
    [
        ({}, 8192),
        ({"max_position_embeddings": None}, 2048),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 32768),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024}}, 8192),
        ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 8192),
    ],
)
def test_the_longest_request(more: dict[str, Any], length: int) -> None:
    assert shape_of(dense(**more)).max_len == length


@pytest.mark.parametrize(("stated", "dtype"), [("float32", "bfloat16"), ("torch.float16", "float16"), (None, "bfloat16")])
def test_what_vllm_computes_in(stated: str | None, dtype: str) -> None:
    assert shape_of(dense(torch_dtype=stated)).dtype == dtype


def test_experts_and_layers_ahead() -> None:
    found = shape("deepseek-v3")

    assert (found.experts, found.active_experts, found.mtp_layers) == (256, 8, 1)
    assert shape("nemotron-3-super-120b-a12b-bf16").mtp_layers == 1
    # No key of its configuration names the layer that its checkpoints have.
    assert shape("qwen3-next-80b-a3b-instruct").mtp_layers == 1
    assert shape("qwen3-32b").experts == shape("qwen3-32b").mtp_layers == 0


@pytest.mark.parametrize(
    ("config", "gaps"),
    [
        (dense(), []),
        (dense(hidden_size=None), ["hidden_size"]),
        (dense(num_hidden_layers=10**9), ["num_hidden_layers"]),
    ],
)
def test_what_a_configuration_does_not_say_is_a_gap(config: dict[str, Any], gaps: list[str]) -> None:
    assert list(shape_of(config).gaps) == gaps


ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**20),
    st.floats(),
    st.text(max_size=6),
    st.lists(st.one_of(st.integers(-1, 9), st.text(max_size=3)), max_size=5),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "mrope_section", "full_attention", "x"]), st.integers(-1, 4), max_size=3),
)
BASES = [
    dense(),
    mixture(),
    *(published(name) for name in ("gemma-4-26b-a4b", "qwen3.5-27b", "nemotron-3-nano-30b-a3b-bf16", "deepseek-v3")),
]
KEYS = sorted({key for base in BASES for key in text_config(base)} | {"max_window_layers", "sliding_window_pattern", "rope_scaling"})


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.sampled_from(BASES), st.dictionaries(st.sampled_from(KEYS), ANY, max_size=4))
def test_whatever_stands_in_it_there_is_a_shape(base: dict[str, Any], changes: dict[str, Any]) -> None:
    found = shape_of({**text_config(base), **changes})
    assert len(found.attentions) in (0, found.layers)
    assert found.max_len > 0
    assert json.dumps(found.max_len)
