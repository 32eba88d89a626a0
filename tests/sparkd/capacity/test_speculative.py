"""What a draft adds to a plan and to the daemon's account: tokens ahead, layers and weights, and the model's entry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparkd.capacity import headers
from sparkd.capacity.headers import drafting_of
from sparkd.capacity.kv_cache import Serving
from sparkd.capacity.planned_entry import draft_keys
from sparkd.capacity.weights import inventory
from sparkd.checkpoint import read_checkpoint
from sparkd.checkpoint.shape import shape_of
from sparkd.config.model import ModelConfig
from sparkd.errors import CheckpointError, ConfigError
from sparkd.hardware import SPARK
from sparkd.vllm.flags import draft_of, speculative_config
from sparkd.vllm.unaccounted_args import CACHE, WEIGHTS
from tests.support import plans
from tests.support.accounts import account, kv_cost, options
from tests.support.checkpoints import Tensor, dense, write
from tests.support.published_headers import checkpoint_of
from tests.support.published_tensors import tensors_of
from workers.quantization.recipe import QuantizationRecipe

PREDICTS = dense(num_nextn_predict_layers=1)
AHEAD: list[Tensor] = [("model.layers.4.eh_proj.weight", (512, 1024), "BF16"), ("model.layers.4.mlp.down_proj.weight", (512, 1024), "BF16")]
AHEAD_BYTES = sum(2 * sides[0] * sides[1] for _, sides, _ in AHEAD)
DRAFT = dense(num_hidden_layers=2)
MTP = {"method": "mtp", "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    write(place / "predicts" / "draft", DRAFT, tensors_of(DRAFT))
    write(place / "plain", dense(), tensors_of(dense()))
    (made := place / "both").mkdir()
    return write(made / "model", PREDICTS, [*tensors_of(PREDICTS), *AHEAD])


def planned(model: Path, **asked: Any) -> dict[str, Any]:
    given = {"max_model_len": 4096, "quantize": "bf16", "max_num_seqs": 8, **asked}
    return json.loads(json.dumps(plans.planned(model, **given)))  # type: ignore[no-any-return]


def test_a_draft_from_the_text_costs_its_logits_only(folder: Path) -> None:
    plain, drafted = planned(folder), planned(folder, speculative="ngram")

    before, after = plain["choice"]["footprint"], drafted["choice"]["footprint"]
    assert (after["weights"], after["kv"]) == (before["weights"], before["kv"]) and after["peak"] >= before["peak"]
    assert drafted["asked"]["speculative"] == "ngram" and plain["asked"]["speculative"] is None
    assert drafted["choice"]["config"]["extra_args"][0] == "--speculative-config" and "extra_args" not in plain["choice"]["config"]
    (rank,) = drafted["choice"]["ranks"]
    config = json.loads(rank["command"][rank["command"].index("--speculative-config") + 1])
    assert (config["method"], config["num_speculative_tokens"]) == ("ngram", 4)
    assert planned(folder, speculative="off")["choice"] == plain["choice"]


def test_layers_that_predict_are_loaded_and_keep_a_cache(folder: Path) -> None:
    before, after = (planned(folder, speculative=how)["choice"]["footprint"] for how in ("off", "mtp"))

    shape = shape_of(PREDICTS)
    assert after["weights"] == before["weights"] + AHEAD_BYTES
    plain, drafted = kv_cost(shape, Serving(4096, 8)), kv_cost(shape, Serving(4096, 8, speculative_tokens=1, draft_layers=1))
    assert after["kv_bytes_per_token"] == drafted.per_token > before["kv_bytes_per_token"] == plain.per_token


def test_a_draft_of_its_own_is_counted_whole(folder: Path) -> None:
    place = str(folder.parent.parent / "predicts" / "draft")
    counted = drafting_of(draft_of({"method": "dflash", "model": place, "num_speculative_tokens": 15}), read_checkpoint)

    checkpoint = read_checkpoint(folder)
    both = counted.inventory(checkpoint, shape_of(checkpoint.config))
    own, draft = inventory(checkpoint, shape_of(PREDICTS)), inventory(read_checkpoint(place), shape_of(DRAFT))
    bf16 = QuantizationRecipe.parse("bf16")
    for ranks in (1, 2):
        # A vocabulary of the draft is not padded.
        assert (
            0
            <= own.formatted(bf16).weights(ranks).bytes
            + draft.formatted(bf16).weights(ranks).bytes
            - both.formatted(bf16).weights(ranks).bytes
            < 1 << 18
        )
    assert both.stored_bytes == own.stored_bytes + draft.stored_bytes
    assert (
        both.formatted(QuantizationRecipe.parse("nvfp4")).weights().bytes > own.formatted(QuantizationRecipe.parse("nvfp4")).weights().bytes
    )
    assert counted.serving(Serving(4096)).draft_layers == 2 and counted.serving(Serving(4096)).speculative_tokens == 15
    assert options(both)[0].fits


@pytest.mark.parametrize(
    ("model", "method", "asked", "told"),
    [
        ("plain", "dflash", {}, "no recipe has such a draft"),
        ("z-lab/none", "dflash", {}, "ngram"),
        ("nvidia/Gemma-4-31B-IT-NVFP4", "dflash", {"kv_cache_dtype": "fp8"}, "KV cache in bfloat16"),
    ],
)
def test_what_cannot_be_is_said(folder: Path, model: str, method: str, asked: dict[str, Any], told: str) -> None:
    source = str(folder.parent.parent / model) if model == "plain" else model
    with pytest.raises(ConfigError, match=told):
        draft_keys(method, source, asked.get("kv_cache_dtype", "auto"))


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b-instruct", "qwen3-coder-next"])
def test_a_configuration_without_a_word_on_layers_ahead_is_judged_by_its_checkpoint(name: str) -> None:
    """The two are of one class; the coder's checkpoint lacks the layer."""
    checkpoint = checkpoint_of(name)
    shape = shape_of(checkpoint.config)
    config = speculative_config(draft_keys("mtp", name, "auto")["extra_args"])
    counted = drafting_of(draft_of(config or {}), read_checkpoint)
    assert counted.ahead and counted.layers == 1
    if name == "qwen3-coder-next":
        with pytest.raises(ConfigError, match=r"\bqwen3_next\b.*without its layers"):
            counted.inventory(checkpoint, shape)
        return
    more = counted.inventory(checkpoint, shape).stored_bytes - inventory(checkpoint, shape).stored_bytes
    assert more == sum(one.nbytes for one in checkpoint.tensors.values() if one.name.startswith("mtp.")) > 1 << 30


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}, 3),
        ({"method": "suffix", "num_speculative_tokens": 8}, 8),
        ({"method": "suffix"}, 24),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 12}, 12),
    ],
)
def test_a_draft_from_the_text_is_counted_however_an_entry_writes_it(config: dict[str, Any], tokens: int, folder: Path) -> None:
    """As vLLM reads it, without a draft's headers."""
    found = drafting_of(draft_of(config), no_headers)
    assert (found.tokens, found.layers, found.draft) == (tokens, 0, None)


@pytest.mark.parametrize("method", ["eagle3", None])
def test_a_draft_is_counted_by_its_headers_and_a_pickled_one_not_at_all(method: str | None, folder: Path, tmp_path: Path) -> None:
    config = {"num_speculative_tokens": 3} | ({"method": method} if method else {})
    found = drafting_of(draft_of({**config, "model": str(folder.parent.parent / "predicts" / "draft")}), read_checkpoint)
    assert (found.layers, found.tokens, found.draft is not None) == (2, 3, True) and not found.serving(Serving(4096)).unknown
    (tmp_path / "config.json").write_text(json.dumps(DRAFT))
    (tmp_path / "pytorch_model.bin").touch()
    found = drafting_of(draft_of({**config, "model": str(tmp_path)}), read_checkpoint)
    assert found.draft is None and found.serving(Serving(4096)).unknown == {WEIGHTS, CACHE}


def test_a_draft_that_is_missing_is_refused() -> None:
    with pytest.raises(CheckpointError, match="/none/draft"):
        drafting_of(draft_of({"method": "eagle3", "model": "/none/draft", "num_speculative_tokens": 3}), read_checkpoint)


def no_headers(name: str) -> Any:
    raise AssertionError(name)


def test_the_daemon_counts_a_draft_as_the_plan_does(folder: Path, tmp_path: Path) -> None:
    def least(*args: str) -> int | None:
        spec = ModelConfig(name="m", model=str(folder), max_model_len=4096, max_num_seqs=8, extra_args=args)
        found = account(spec, SPARK, {})
        return None if found is None else found.fixed

    plain, drafted = least(), least("--speculative-config", json.dumps(MTP))
    assert plain is not None and drafted is not None and drafted >= plain + AHEAD_BYTES
    assert least("--speculative-config", json.dumps({"method": "ngram", "num_speculative_tokens": 4})) is not None
    assert least("--speculative-config", json.dumps({"method": "eagle3", "num_speculative_tokens": 4, "model": "/none"})) is None
    assert least("--speculative-config", json.dumps(MTP), "--mamba-cache-mode", "all") is None
    assert least("--attention-backend", "TRITON_ATTN") == plain
    headers._read.cache_clear()


def test_a_configuration_that_nests_without_end_is_none() -> None:
    assert speculative_config(("--speculative-config", "[" * 5000)) is None
