"""What a model needs at least, what of it is decided when it is placed, and what is said where it does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkd.admission import Account, account, advice, free_on, machine, no_room, resolved
from sparkd.config import Config, parse_model
from sparkd.errors import ConfigError, RankError
from sparkd.hardware import GIB
from sparkd.model_config import ModelConfig
from sparkd.needs import Need, need_of, too_large
from sparkd.recipe_book import AsWritten, Book
from sparkd.recipe_check import checked
from sparkd.uncounted import uncounted
from sparkd.vllm_flags import without
from tests.shards import layered, write_sparse

BOOK = Book(None, AsWritten())
SPARK = machine("cuda", 121 * GIB, 0)
LAYERS, HIDDEN, INNER, VOCAB = 32, 4096, 14_336, 32_000
# K and V of 8 heads of 128 in bfloat16, for each layer.
TOKEN_BYTES = LAYERS * 2 * 8 * 128 * 2
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An 8B model whose data are holes."""
    layer = {f"self_attn.{name}_proj.weight": (rows, HIDDEN) for name, rows in (("q", HIDDEN), ("k", 1024), ("v", 1024), ("o", HIDDEN))}
    layer |= {"mlp.gate_proj.weight": (INNER, HIDDEN), "mlp.up_proj.weight": (INNER, HIDDEN), "mlp.down_proj.weight": (HIDDEN, INNER)}
    ends = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), ("BF16", (VOCAB, HIDDEN)))
    return write_sparse(tmp_path_factory.mktemp("llama"), {**ends, **layered(LAYERS, layer)}, CONFIG)


def spec_of(folder: Path, **keys: Any) -> ModelConfig:
    return parse_model("m", {"model": str(folder), **keys}, over_admin=False)


def of(folder: Path, **keys: Any) -> Account:
    found = account(spec_of(folder, **keys), SPARK, {})
    assert found is not None
    return found


def test_the_account_of_a_model(folder: Path) -> None:
    found = of(folder, max_model_len=8192)
    weights = 2 * (2 * VOCAB * HIDDEN + LAYERS * (HIDDEN * (2 * HIDDEN + 2048) + 3 * INNER * HIDDEN))
    rotary = 131_072 * 128 * 2
    assert found.least - found.fixed == TOKEN_BYTES * (8192 + 16)  # and the block that vLLM keeps
    assert found.fixed > weights + rotary + 3 * GIB
    assert found.asked is None
    assert "one request of 8,192 tokens" in found.sentence
    assert f"weights {(weights + rotary) / GIB:.1f} GiB" in found.sentence


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        ({"tokens": 100_000}, 100_000),
        ({"sequences": 3}, 3 * 8192),
        ({"sequences": 3, "at": 4096}, 3 * 4096),
        ({"bytes": "4GiB"}, 4 * GIB / TOKEN_BYTES),
    ],
)
def test_a_cache_of_a_given_size_is_reserved_and_no_more(folder: Path, size: dict[str, Any], tokens: float) -> None:
    found = of(folder, max_model_len=8192, kv_cache=size)
    assert found.asked is not None
    assert found.asked - found.fixed == pytest.approx(tokens * TOKEN_BYTES, abs=16 * TOKEN_BYTES)


def test_four_bits_need_less(folder: Path) -> None:
    whole, small = of(folder, max_model_len=8192), of(folder, max_model_len=8192, quantize="nvfp4")
    linear = LAYERS * (HIDDEN * (2 * HIDDEN + 2048) + 3 * INNER * HIDDEN)
    assert whole.fixed - small.fixed == pytest.approx(linear * (2 - 0.5 - 1 / 16), rel=1e-4)


@pytest.mark.parametrize("keys", [{"extra_args": ["--block-size", "32"]}, {"quantization": "fp8"}, {"kv_cache_dtype": "turboquant_4bit"}])
def test_nothing_is_said_of_what_is_not_known(folder: Path, keys: dict[str, Any]) -> None:
    assert account(spec_of(folder, **keys), SPARK, {}) is None


def test_flags_of_kernels_and_chats_are_counted_past(folder: Path) -> None:
    plain = of(folder, max_model_len=8192)
    free = [
        "--moe-backend",
        "marlin",
        "--linear-backend=marlin",
        "--enable_prefix_caching",
        "--attention-backend",
        "flashinfer",
        "-ac",
        "{}",
    ]
    assert of(folder, max_model_len=8192, extra_args=free) == plain
    whole = of(folder, max_model_len=32_768, extra_args=["--no-enable-chunked-prefill"])
    assert whole == of(folder, max_model_len=32_768, max_num_batched_tokens=32_768)


@pytest.mark.parametrize("name", sorted(BOOK.names()))
def test_every_recipe_has_an_account_but_for_named_flags(folder: Path, name: str) -> None:
    """Drafts aside: a draft is counted by its own headers."""
    for each in checked(BOOK.find(name), BOOK).resolved:
        args = without(each.model.extra_args, "speculative-config")
        keys = {"model": str(folder), "extra_args": args, "max_model_len": 8192, "max_num_batched_tokens": None, "quantization": None}
        found = account(each.model.model_copy(update=keys), SPARK, {})
        assert (found is None) == any(uncounted(args)), each.choice


@pytest.mark.parametrize("args", [["--block-size", "32"], ["--hf_overrides={}"], ["--max-num-b", "1"]])
def test_auto_beside_a_flag_that_is_not_counted_is_refused(folder: Path, args: list[str]) -> None:
    flag = args[0].partition("=")[0]
    with pytest.raises(ConfigError, match=f"{flag} and quantize: auto exclude each other"):
        spec_of(folder, quantize="auto", extra_args=args)
    assert resolved(spec_of(folder, quantize="auto", extra_args=["--moe-backend", "marlin"]), SPARK, {}, 15 * GIB).quantize
    with pytest.raises(RankError, match="kv_cache_dtype: turboquant_4bit"):
        resolved(spec_of(folder, quantize="auto", kv_cache_dtype="turboquant_4bit"), SPARK, {}, 15 * GIB)


def test_nothing_is_said_of_files_that_are_not_here(tmp_path: Path) -> None:
    assert account(spec_of(tmp_path), SPARK, {}) is None
    assert account(parse_model("m", {"model": "owner/name"}, over_admin=False), SPARK, {"HF_HUB_CACHE": str(tmp_path)}) is None


@pytest.mark.parametrize("quantize", [None, "fp8", "nvfp4"])
def test_auto_is_the_best_format_that_fits(folder: Path, quantize: str | None) -> None:
    given = {"max_model_len": 8192, "max_num_seqs": 16}
    room = of(folder, quantize=quantize, **given).least
    for free, better in ((room, quantize), (room - 1, {None: "fp8", "fp8": "nvfp4", "nvfp4": "int4-g64"}[quantize])):
        found = resolved(spec_of(folder, quantize="auto", **given), SPARK, {}, free)
        assert (found.quantize or {}).get("format") == better
        assert found.max_model_len == 8192


def test_auto_is_the_longest_context_that_fits(folder: Path) -> None:
    def longest(room: int) -> Any:
        return resolved(spec_of(folder, max_model_len="auto", max_num_seqs=16), SPARK, {}, room).max_model_len

    assert longest(100 * GIB) == 131_072
    room = of(folder, max_model_len=50 * 1024, max_num_seqs=16).least
    assert (longest(room), longest(room - 1)) == (50 * 1024, 49 * 1024)


def test_what_is_given_stays(folder: Path) -> None:
    given = spec_of(folder, quantize="fp8", max_model_len=4096)
    assert resolved(given, SPARK, {}, GIB) is given
    assert resolved(spec_of(folder, quantize="auto", max_model_len=4096), SPARK, {}, GIB).max_model_len == 4096


def test_a_model_that_no_node_can_hold_is_told_what_would(folder: Path) -> None:
    spec = spec_of(folder, max_num_seqs=16)
    why = too_large(Need(spec, "cuda", "x", 121, of(folder, max_num_seqs=16)), 24, "this node", {})
    assert why is not None
    assert why.startswith("m does not fit: it needs at least ")
    assert "this node offers 24 GiB. What would fit: max_model_len " in why
    assert "tokens" in why
    assert too_large(Need(spec, "cuda", "x", 20, of(folder, max_num_seqs=16)), 121, "this node", {}) is None
    assert "quantize: fp8" in advice(spec_of(folder, max_model_len=32_768, max_num_seqs=16), SPARK, {}, 19 * GIB)


def test_whose_end_would_make_room() -> None:
    held = [("big", "a", 60), ("small", "a", 20), ("other", "b", 30)]
    assert free_on({"a": 100.0, "b": 40.0}, [(node, gib) for _, node, gib in held]) == {"a": 20.0, "b": 10.0}
    why = no_room("m", 50, {"a": 100.0, "b": 40.0}, held)
    assert "free GiB: a 20 of 100, b 10 of 40" in why
    assert "Unload big, give kv_cache a size" in why
    assert "Unload some" in no_room("m", 95, {"a": 100.0, "b": 40.0}, held)
    assert "on each of 2 nodes" in no_room("m", 50, {"a": 100.0, "b": 40.0}, held, 2)


class Runtime:
    def __init__(self, entrypoint: str | None) -> None:
        self.entrypoint = entrypoint

    def runtime(self, _interpreter: str) -> dict[str, Any]:
        return {"platform": "cuda", "entrypoint": self.entrypoint}


def test_the_need_of_a_model(folder: Path, tmp_path: Path) -> None:
    config = Config.model_validate({"state_dir": tmp_path})
    sized = spec_of(folder, max_model_len=8192, kv_cache={"sequences": 2}, quantize="auto", max_num_seqs=16)
    found = need_of(sized, config, Runtime("e"), 100.0, 100.0)
    assert found.spec.quantize is None
    assert found.account is not None
    assert found.account.asked is not None
    assert found.gib - 1 < found.account.asked / GIB <= found.gib
    with pytest.raises(RankError, match="has no vLLM"):
        need_of(sized, config, Runtime(None), 100.0, 100.0)
    with pytest.raises(RankError, match="is not on this node"):
        need_of(spec_of(tmp_path / "gone"), config, Runtime("e"), 100.0, 100.0)
