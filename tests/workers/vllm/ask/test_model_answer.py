"""What the real vLLM says of published configurations, without a GPU: caches, parameters, splits and refusals, exactly."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from sparkd.checkpoint import read_checkpoint
from sparkd.vllm.ask.answers import OWN, SPARK, ModelAnswer, ModelQuestion
from sparkd.vllm.ask.model import InquiryRuntime, ask
from tests.conftest import VllmAnswers
from tests.support.checkpoints import write
from tests.support.kept_answer import kept
from workers.vllm.ask.model_question import DRAFT as MOVED

CONFIGS = Path(__file__).parents[3] / "fixtures/configs"
DRAFT = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}')
# Of the small one's two layers, its embedding and its head.
SMALL_BYTES = 2 * (2 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14_336 + 2 * 4096) + 4096 + 2 * 128_256 * 4096)
# A draft of one layer that has a head of its own, of fewer words, and takes the model's embedding.
EAGLE = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256,
    "draft_vocab_size": 32_000, "max_position_embeddings": 131_072, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5,
}  # fmt: skip


def published(name: str, **fields: object) -> ModelQuestion:
    return ModelQuestion(files={"config.json": (CONFIGS / f"{name}.json").read_bytes()}, **{"platform": SPARK, **fields})  # type: ignore[arg-type]


QUESTIONS = {
    "dense": published("llama-3.1-8b", args=("--max-model-len", "8192")),
    "dense here": published("llama-3.1-8b", platform=OWN),
    "dense, four ranks": published("llama-3.1-8b", tensor_parallel=2, pipeline_parallel=2),
    "dense, FP8 cache": published("llama-3.1-8b", args=("--kv_cache_dtype", "fp8", "--block_size=32")),
    "two layers": published("llama-3.1-8b", args=("--hf-overrides", '{"num_hidden_layers": 2, "max_position_embeddings": 65536}')),
    "three ranks": published("llama-3.1-8b", tensor_parallel=3),
    "windows": published("gpt-oss-20b"),
    "states": published("qwen3-next-80b-a3b-instruct"),
    "draft": published("qwen3-next-80b-a3b-instruct", args=DRAFT),
    "latent": published("deepseek-v2-lite"),
    "flag": published("llama-3.1-8b", args=("--max-model-len", "many")),
    "unknown": ModelQuestion(files={"config.json": b'{"model_type": "llama", "architectures": ["NoSuchModel"]}'}, platform=SPARK),
}
# Asked under `make test-all`, with `drafts`.
MORE = {
    "FP8 of vLLM's own": published("llama-3.1-8b", args=("--quantization", "fp8")),
    "experts in FP8": published("qwen3-30b-a3b-fp8"),
    "images": published("gemma-4-26b-a4b"),
    "FP8 cache of its own": published("nemotron-3-super-120b-a12b-nvfp4"),
}


def questions(_folder: Path) -> dict[str, ModelQuestion]:
    return QUESTIONS


def drafts(folder: Path) -> dict[str, ModelQuestion]:
    names = ("lm_head.weight", "midlayer.self_attn.q_proj.weight")
    eagle = write(folder / "eagle", EAGLE, [(name, (8, 8), "BF16") for name in names])
    llama = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
    whole = write(folder / "whole", llama | {"num_hidden_layers": 2}, [])
    gemma = json.loads((CONFIGS / "gemma-4-12b-it-assistant.json").read_text())
    assistant = write(folder / "assistant", gemma | {"architectures": ["Gemma4AssistantForCausalLM"]}, [])
    configs = {
        "EAGLE": {"method": "eagle3", "model": str(eagle), "num_speculative_tokens": 3},
        "whole draft": {"model": str(whole), "num_speculative_tokens": 3},
        "assistant": {"method": "mtp", "model": str(assistant), "num_speculative_tokens": 3},
    }
    args = {name: ("--speculative-config", json.dumps(config)) for name, config in configs.items()}
    models = {name: "gemma-4-12b-it" if name == "assistant" else "llama-3.1-8b" for name in args}
    on_a_hub = json.dumps({**configs["EAGLE"], "model": MOVED})
    draft = replace(read_checkpoint(str(eagle)), folder="hf://o/eagle@0")
    hub = published("llama-3.1-8b", args=("--speculative-config", on_a_hub), draft=draft)
    return {**{name: published(models[name], args=words) for name, words in args.items()}, "EAGLE on a hub": hub}


@pytest.fixture(scope="module")
def answers(vllm_answers: VllmAnswers) -> dict[str, ModelAnswer]:
    return {name: answer for name, answer in vllm_answers.answers[__name__].items() if answer is not None}


@pytest.fixture(scope="module")
def more_answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelAnswer]:
    """One more child, for what `make test` does not ask."""
    asked = {**MORE, **drafts(tmp_path_factory.mktemp("drafts"))}
    runtime = InquiryRuntime(None, [tmp_path_factory.mktemp("answers")])
    found = zip(asked, ask(list(asked.values()), runtime), strict=True)
    return {name: answer for name, answer in found if answer is not None}


def test_an_answer_is_kept(vllm_answers: VllmAnswers) -> None:
    for name, question in vllm_answers.questions[__name__].items():
        assert kept(question, vllm_answers.runtime) == vllm_answers.answers[__name__][name]


def bytes_of(answer: ModelAnswer) -> tuple[int, float, int]:
    """(of parameters, of a token, of a request's states), over all stages."""
    assert answer.refusal is None, answer.refusal
    layers = [layer for stage in answer.stages for layer in stage.layers]
    return (
        sum(stage.parameter_bytes for stage in answer.stages),
        sum(layer.token_bytes for layer in layers),
        sum(layer.state_bytes for layer in layers),
    )


def test_a_dense_model(answers: dict[str, ModelAnswer]) -> None:
    dense = answers["dense"]
    assert (dense.platform, dense.stand_in) == ("cuda:12.1", True)
    assert bytes_of(dense) == (16_060_522_496, 131_072, 0)
    assert bytes_of(answers["dense here"]) == (16_060_522_496, 131_072, 0) and answers["dense here"].platform == "cpu"
    assert {(layer.token_bytes, layer.window, layer.block) for layer in dense.stages[0].layers} == {(4096.0, None, 16)}
    facts = {"max_model_len": 8192, "cache_dtype": "auto", "quantization": None, "layers": 32}
    assert facts.items() <= dense.facts.items()
    assert dense.stages[0].requests[-1] == (8192, 8192 * 131_072) and dense.stages[0].block_bytes == 16 * 131_072


def test_each_rank_of_a_split_has_its_share(answers: dict[str, ModelAnswer]) -> None:
    split = answers["dense, four ranks"]
    assert [len(stage.layers) for stage in split.stages] == [16, 16]
    assert {layer.token_bytes for stage in split.stages for layer in stage.layers} == {2048.0}
    assert bytes_of(split)[1] == 131_072 / 2
    assert [stage.requests[-1] for stage in split.stages] == [(131_072, 131_072 * 131_072 // 4)] * 2
    shape = next(tensor.shape for tensor in split.stages[0].parameters if tensor.name == "model.layers.0.self_attn.qkv_proj.weight")
    assert shape == (3072, 4096)


def test_a_split_that_does_not_work_is_refused_in_vllms_words(answers: dict[str, ModelAnswer]) -> None:
    refusal = answers["three ranks"].refusal
    assert refusal is not None and (refusal.step, refusal.certain) == ("config", True) and "divisible" in refusal.message


def test_an_fp8_cache_takes_half(answers: dict[str, ModelAnswer]) -> None:
    answer = answers["dense, FP8 cache"]
    assert bytes_of(answer)[1] == 65_536 and answer.facts["cache_dtype"] == "fp8" and answer.stages[0].layers[0].block == 32


def test_an_override_of_the_configuration_is_followed(answers: dict[str, ModelAnswer]) -> None:
    two = answers["two layers"]
    assert (*bytes_of(two), two.facts["max_model_len"]) == (SMALL_BYTES, 2 * 4096, 0, 65_536)


@pytest.mark.rest
def test_weights_that_vllm_quantizes_itself_are_counted_as_they_become(more_answers: dict[str, ModelAnswer]) -> None:
    answer = more_answers["FP8 of vLLM's own"]
    linear = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14_336)
    assert answer.facts["quantization"] is not None and bytes_of(answer)[0] == 16_060_522_496 - linear


@pytest.mark.rest
def test_a_draft_of_its_own_has_its_layers_and_weights(more_answers: dict[str, ModelAnswer]) -> None:
    eagle = more_answers["EAGLE"]
    assert [more_answers["EAGLE on a hub"].stages, more_answers["EAGLE on a hub"].refusal] == [eagle.stages, None]
    attention = 2 * 4096 * 6144 + 4096 * 4096
    draft = 3 * 4096 * 4096 + attention + 3 * 4096 * 14_336 + 32_000 * 4096 + 4 * 4096
    # And the model's number of each of the draft's words, in 64 bits.
    assert bytes_of(eagle) == (16_060_522_496 + 2 * draft + 8 * 32_000, 33 * 4096, 0)
    names = {tensor.name for tensor in eagle.stages[0].parameters if tensor.purpose == "draft"}
    assert any("lm_head" in name for name in names) and not any("embed_tokens" in name for name in names)
    whole = more_answers["whole draft"]
    assert bytes_of(whole) == (16_060_522_496 + SMALL_BYTES, (32 + 2) * 4096, 0)


@pytest.mark.rest
def test_a_draft_that_reads_the_models_cache_has_none(more_answers: dict[str, ModelAnswer]) -> None:
    (stage,) = more_answers["assistant"].stages
    assert len(stage.layers) == 48
    assert sum(tensor.purpose == "draft" for tensor in stage.parameters) == 40


@pytest.mark.rest
def test_experts_in_fp8_are_counted_with_their_scales(more_answers: dict[str, ModelAnswer]) -> None:
    answer = more_answers["experts in FP8"]
    dtypes = Counter(tensor.dtype for tensor in answer.stages[0].parameters if ".experts." in tensor.name)
    assert answer.facts["quantization"] == "fp8" and dtypes == {"float8_e4m3fn": 96, "float32": 96}
    assert bytes_of(answer)[1] == 98_304


def test_windows_states_latents_and_drafts_are_told_apart(answers: dict[str, ModelAnswer]) -> None:
    assert Counter((layer.spec, layer.window) for layer in answers["windows"].stages[0].layers) == {
        ("FullAttentionSpec", None): 12,
        ("SlidingWindowSpec", 128): 12,
    }
    states = answers["states"]
    assert Counter(layer.spec for layer in states.stages[0].layers) == {"FullAttentionSpec": 12, "MambaSpec": 36}
    assert bytes_of(states)[1:] == (24_576, 39_518_208)
    assert {(layer.spec, layer.token_bytes) for layer in answers["latent"].stages[0].layers} == {("MLAAttentionSpec", 1152.0)}
    draft = answers["draft"]
    assert len(draft.stages[0].layers) == 49 and bytes_of(draft)[1] == 26_624
    ahead = {tensor.name for tensor in draft.stages[0].parameters if tensor.purpose == "draft"}
    assert ahead and not any("embed_tokens" in name or "lm_head" in name for name in ahead)


@pytest.mark.rest
def test_a_model_of_images_is_built_without_torchvision(more_answers: dict[str, ModelAnswer]) -> None:
    answer = more_answers["images"]
    assert (answer.refusal, bytes_of(answer)[1]) == (None, 225_280)


@pytest.mark.rest
def test_a_cache_that_the_checkpoint_has_in_fp8_is_resolved(more_answers: dict[str, ModelAnswer]) -> None:
    answer = more_answers["FP8 cache of its own"]
    assert (answer.facts["cache_dtype"], bytes_of(answer)[1:]) == ("fp8_e4m3", (4_096, 170_229_760))


def test_flags_and_architectures_that_it_does_not_take_are_refused(answers: dict[str, ModelAnswer]) -> None:
    flag, unknown = answers["flag"].refusal, answers["unknown"].refusal
    assert flag is not None and (flag.step, flag.certain) == ("arguments", True) and "--max-model-len" in flag.message
    assert unknown is not None and (unknown.step, unknown.certain) == ("config", True) and "NoSuchModel" in unknown.message
