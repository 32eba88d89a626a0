"""The abilities that a model's files show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparkd.config.model import ModelConfig
from sparkd.config.tasks import abilities_of, tasks_of
from sparkd.state.abilities import GENERATE, POOL, TRANSCRIBE, Abilities, RequestNeeds

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 8192,
}
BROKEN = ("{", "[" * 100_000, '{"architectures": ["X"], "num_hidden_layers": "x"}')


@pytest.mark.parametrize(
    ("name", "files", "tasks"),
    [
        ("Qwen3ForCausalLM", (), {GENERATE}),
        ("Qwen3ForCausalLM", ("modules.json", "1_Pooling"), {POOL}),
        ("Qwen3ForCausalLM", ("modules.json",), None),
        ("Qwen3VLForConditionalGeneration", (), {GENERATE, TRANSCRIBE}),
        ("WhisperForConditionalGeneration", (), {TRANSCRIBE}),
        ("BertModel", (), {POOL}),
        ("Qwen2ForRewardModel", (), {POOL}),
        ("SomethingNew", (), None),
    ],
)
def test_tasks_by_architecture(name: str, files: tuple[str, ...], tasks: set[str] | None) -> None:
    assert tasks_of({"architectures": [name]}, files) == tasks


@pytest.mark.parametrize("config", [{}, {"architectures": "LlamaForCausalLM"}])
def test_a_config_without_an_architecture_tells_nothing(config: dict[str, Any]) -> None:
    assert tasks_of(config, ()) is None


def model(folder: Path, config: object, **keys: Any) -> ModelConfig:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return ModelConfig(name="m", model=str(folder), **keys)


def test_flags_that_make_something_else_of_it(tmp_path: Path) -> None:
    assert abilities_of(model(tmp_path, LLAMA), {}).tasks == {GENERATE}
    assert abilities_of(model(tmp_path, LLAMA, extra_args=["--enable-prefix-caching"]), {}).tasks == {GENERATE}
    for flags in (["--runner", "pooling"], ["--convert=embed"], ["--hf-overrides", "{}"]):
        assert abilities_of(model(tmp_path, LLAMA, extra_args=flags), {}).tasks is None, flags


def test_the_longest_request(tmp_path: Path) -> None:
    assert abilities_of(model(tmp_path, LLAMA), {}).max_model_len == 8192
    assert abilities_of(model(tmp_path, LLAMA, max_model_len=100), {}).max_model_len == 100
    assert abilities_of(model(tmp_path, LLAMA, max_model_len="auto"), {}).max_model_len is None


@pytest.mark.parametrize("text", BROKEN)
def test_what_cannot_be_read_tells_nothing(tmp_path: Path, text: str) -> None:
    assert abilities_of(model(tmp_path, text, max_model_len=7), {}) == Abilities(max_model_len=7)


def test_no_files_tell_nothing(tmp_path: Path) -> None:
    assert abilities_of(ModelConfig(name="m", model=str(tmp_path / "none")), {}) == Abilities()
    assert abilities_of(ModelConfig(name="m", model="owner/is-not-here"), {"HF_HUB_CACHE": str(tmp_path)}) == Abilities()


def test_where_nothing_is_known_everything_may_be_asked() -> None:
    chat, embed, tokens = (
        RequestNeeds("/v1/chat/completions", GENERATE),
        RequestNeeds("/v1/embeddings", POOL),
        RequestNeeds("/tokenize", None),
    )
    assert all(Abilities().has(need) for need in (chat, embed, tokens))
    text = Abilities(frozenset((GENERATE,)))
    assert [text.has(need) for need in (chat, embed, tokens)] == [True, False, True]
    told = Abilities(frozenset((GENERATE,)), frozenset((embed.path,)))
    assert [told.has(need) for need in (chat, embed, tokens)] == [False, True, False]
