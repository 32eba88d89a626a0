"""What a model needs at least, what of it is decided when it is placed, and what is said where it does not fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparkd.capacity.fit import Option, it_needs
from sparkd.capacity.footprint import Footprint
from sparkd.capacity.placed_entry import refused_flags
from sparkd.config.config import Config, parse_model
from sparkd.config.engine_args import engine_args
from sparkd.config.kv_cache import kv_cache, spelled
from sparkd.config.model import ModelConfig
from sparkd.config.recipe_check import resolve
from sparkd.errors import ConfigError, ModelUnusable, RankError
from sparkd.hardware import machine
from sparkd.recipes.library import AsWritten, RecipeLibrary
from sparkd.units import GIB
from sparkd.vllm.flags import parsed, without
from sparkd.vllm.unaccounted_args import unsized
from tests.support.accounts import account, advice, needed_gib, needing, option, requirement, resolved, too_large
from tests.support.checkpoints import LLAMA_8B, write
from tests.support.facts import lacking
from tests.support.published_tensors import tensors_of
from workers.host.memory_limits import spare
from workers.quantization.recipe import QuantizationRecipe

BOOK = RecipeLibrary(None, AsWritten())
SPARK = machine("cuda", 121 * GIB, 0)
LAYERS = 32
HIDDEN, INNER, VOCAB = (LLAMA_8B[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
# K and V of 8 heads of 128 in bfloat16, for each layer.
TOKEN_BYTES = LAYERS * 2 * 8 * 128 * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An 8B model whose data are holes."""
    return write(tmp_path_factory.mktemp("llama"), LLAMA_8B, tensors_of(LLAMA_8B))


def spec_of(folder: Path, **keys: Any) -> ModelConfig:
    return parse_model("m", {"model": str(folder), **keys}, over_admin=False)


def format_of(spec: ModelConfig) -> str | None:
    return spec.quantize.default.spelling if isinstance(spec.quantize, QuantizationRecipe) else None


def of(folder: Path, **keys: Any) -> Footprint:
    found = account(spec_of(folder, **keys), SPARK, {})
    assert found is not None and found.sureness == "guess"
    return found


def exact(found: Option | None) -> Option:
    """As vLLM's answer makes it: a guess refuses less."""
    assert found is not None and found.footprint is not None and found.footprint.sureness == "guess"
    needed = found.footprint
    parts = {**needed.parts, "weights": needed.parts["weights"] + needed.upper_bytes}
    return replace(found, footprint=replace(needed, parts=parts, upper_weight_bytes=0, upper_cache_bytes=0, sureness="exact"))


def test_the_account_of_a_model(folder: Path) -> None:
    found = of(folder, max_model_len=8192)
    weights = 2 * (2 * VOCAB * HIDDEN + LAYERS * (HIDDEN * (2 * HIDDEN + 2048) + 3 * INNER * HIDDEN))
    assert found.least - found.fixed == TOKEN_BYTES * (8192 + 16)  # and the block that vLLM keeps
    assert found.fixed > weights + 3 * GIB
    assert found.cache is None
    sentence = it_needs(engine_args(spec_of(folder, max_model_len=8192), {}), found)
    assert lacking(sentence, "8,192 tokens") == []
    assert f"weights {weights / GIB:.1f} GiB" in sentence


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
    assert found.cache is not None
    assert found.cache == pytest.approx(tokens * TOKEN_BYTES, abs=16 * TOKEN_BYTES)


def test_a_checkpoint_that_asks_for_a_cache_in_fp8_has_one(tmp_path: Path) -> None:
    """As vLLM takes it where nobody names one."""
    said = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}
    config = LLAMA_8B | {"num_hidden_layers": 1, "quantization_config": said}
    folder = write(tmp_path, config, tensors_of(config))
    plain, whole = of(folder, max_model_len=8192), of(folder, max_model_len=8192, kv_cache_dtype="bfloat16")
    assert plain.kv.least * 2 == whole.kv.least
    assert of(folder, max_model_len=8192, kv_cache_dtype="fp8").kv.least == plain.kv.least


def test_float32_takes_twice_as_much_of_everything(folder: Path) -> None:
    plain, wide = of(folder, max_model_len=8192), of(folder, max_model_len=8192, dtype="float32")
    assert wide.layout.block_bytes == 2 * plain.layout.block_bytes
    weights = 2 * (2 * VOCAB * HIDDEN + LAYERS * (HIDDEN * (2 * HIDDEN + 2048) + 3 * INNER * HIDDEN))
    assert weights < wide.fixed - plain.fixed < 1.3 * weights
    assert of(folder, max_model_len=8192, kv_cache_dtype="bfloat16", dtype="float32").layout.block_bytes == plain.layout.block_bytes
    assert wide.sureness == plain.sureness
    assert account(spec_of(folder, quantize="nvfp4", dtype="float32"), SPARK, {}) is None


def test_nothing_is_said_of_what_is_not_known(folder: Path) -> None:
    assert account(spec_of(folder, quantization="fp8"), SPARK, {}) is None


def test_flags_of_kernels_and_chats_are_counted_past(folder: Path) -> None:
    plain = of(folder, max_model_len=8192)
    free = ["--moe-backend", "marlin", "--enable-prefix-caching", "--attention-backend", "flashinfer"]
    assert of(folder, max_model_len=8192, extra_args=free) == plain
    whole = of(folder, max_model_len=32_768, extra_args=["--no-enable-chunked-prefill"])
    assert whole == of(folder, max_model_len=32_768, max_num_batched_tokens=32_768)


@pytest.mark.parametrize("name", sorted(BOOK.names()))
def test_every_recipe_has_an_account_but_for_named_flags(folder: Path, name: str) -> None:
    """Drafts aside: a draft is counted by its own headers."""
    model = resolve(name, BOOK)
    args = without(model.extra_args, "speculative-config")
    keys = {"model": str(folder), "extra_args": args, "max_model_len": 8192, "max_num_batched_tokens": None, "quantization": None}
    found = account(model.model_copy(update=keys), SPARK, {})
    assert (found is None) == any(unsized(parsed(args)))


@pytest.mark.parametrize("args", [["--kv-offloading-size", "1"], ["--worker-cls=some.Worker"]])
def test_auto_beside_a_flag_that_is_not_counted_is_refused(folder: Path, args: list[str]) -> None:
    flag = args[0].partition("=")[0]
    with pytest.raises(ConfigError, match=f"{flag} and quantize: auto\\b"):
        spec_of(folder, quantize="auto", extra_args=args)
    assert resolved(spec_of(folder, quantize="auto", extra_args=["--moe-backend", "marlin"]), SPARK, {}, 15 * GIB).quantize
    for keys in ({"extra_args": ["--mamba-cache-mode", "all"]}, {"kv_cache_dtype": "turboquant_4bit"}):
        # A format by what the formulas see, a length by vLLM, which measures.
        found = resolved(spec_of(folder, quantize="auto", max_model_len="auto", **keys), SPARK, {}, 15 * GIB)
        assert (found.quantize is not None, found.max_model_len) == (True, "auto")


def test_a_flag_that_a_start_measures_has_no_machine_reserved(folder: Path) -> None:
    """A model of 16 GiB with a cache of 2, of a machine that lends 118."""
    sized = {"max_model_len": 8192, "kv_cache": {"bytes": "2GiB"}}
    plain = spec_of(folder, **sized)
    for flags in (["--max-num-seqs", "16"], ["--compilation-config", "{}"]):
        spec = spec_of(folder, extra_args=flags, **sized)
        gib = [needed_gib(one, "cuda", 121.6, {}, 118.0, account(one, SPARK, {})) for one in (plain, spec)]
        assert max(gib) < 25, flags


def test_nothing_is_said_of_files_that_are_not_here(tmp_path: Path) -> None:
    assert account(spec_of(tmp_path), SPARK, {}) is None
    assert account(parse_model("m", {"model": "owner/name"}, over_admin=False), SPARK, {"HF_HUB_CACHE": str(tmp_path)}) is None


@pytest.mark.parametrize("quantize", [None, "fp8", "nvfp4"])
def test_auto_is_the_best_format_that_fits(folder: Path, quantize: str | None) -> None:
    given = {"max_model_len": 8192, "max_num_seqs": 16, "kv_margin_gib": 0}
    room = of(folder, quantize=quantize, **given).least
    for free, better in ((room, quantize), (room - 1, {None: "fp8", "fp8": "nvfp4", "nvfp4": "int4-g64"}[quantize])):
        found = resolved(spec_of(folder, quantize="auto", **given), SPARK, {}, free)
        assert format_of(found) == better
        assert found.max_model_len == 8192


def test_auto_is_the_longest_context_that_fits(folder: Path) -> None:
    def longest(room: int) -> Any:
        return resolved(spec_of(folder, max_model_len="auto", max_num_seqs=16, kv_margin_gib=0), SPARK, {}, room).max_model_len

    assert longest(100 * GIB) == 131_072
    room = of(folder, max_model_len=50 * 1024, max_num_seqs=16).least
    assert (longest(room), longest(room - 1)) == (50 * 1024, 49 * 1024)


KEPT = spare(121 * GIB)  # of a Spark's memory, as the worker leaves free where the entry has no margin


@pytest.mark.parametrize(
    ("keys", "free"),
    [
        (lambda room: {"memory_gib": room / GIB}, lambda room: 100 * GIB),
        (lambda room: {}, lambda room: room + KEPT),
        (lambda room: {"kv_margin_gib": 20}, lambda room: room + 20 * GIB),
        # Of the share vLLM takes all but what its processes hold.
        (lambda room: {"gpu_memory_utilization": (room - 3 * GIB) / (121 * GIB)}, lambda room: 100 * GIB),
    ],
)
def test_auto_keeps_to_the_entrys_own_limits(folder: Path, keys: Callable[[int], dict[str, Any]], free: Callable[[int], int]) -> None:
    least = of(folder, max_model_len=50 * 1024, max_num_seqs=16).least
    for room, longest, form in ((least + 2048, 50 * 1024, None), (least - 2048, 49 * 1024, "fp8")):
        own = {"max_num_seqs": 16, **keys(room)}
        assert resolved(spec_of(folder, max_model_len="auto", **own), SPARK, {}, free(room)).max_model_len == longest
        found = resolved(spec_of(folder, quantize="auto", max_model_len=50 * 1024, **own), SPARK, {}, free(room))
        assert format_of(found) == form


@pytest.mark.parametrize(
    ("size", "most"),
    [({"tokens": 50 * 1024}, 50 * 1024), ({"bytes": 50 * 1024 * TOKEN_BYTES}, 49 * 1024), ({"sequences": 5, "at": 10 * 1024}, 50 * 1024)],
)
def test_auto_is_no_longer_than_the_cache_that_was_asked_for(folder: Path, size: dict[str, Any], most: int) -> None:
    """One block of a cache in bytes is vLLM's own."""
    spec = spec_of(folder, max_model_len="auto", max_num_seqs=16, kv_cache=size)
    assert resolved(spec, SPARK, {}, 100 * GIB).max_model_len == most


def test_a_cpus_cache_is_two_gib_and_a_context_no_longer(folder: Path) -> None:
    cpu = machine("cpu", 121 * GIB, 0)
    spec = spec_of(folder, max_model_len="auto", max_num_seqs=4)
    assert resolved(spec, cpu, {}, 100 * GIB).max_model_len == 15 * 1024
    assert resolved(spec, cpu, {"VLLM_CPU_KVCACHE_SPACE": "8"}, 100 * GIB).max_model_len == 63 * 1024
    assert resolved(spec_of(folder, max_model_len="auto", kv_cache="auto"), cpu, {}, 100 * GIB).max_model_len == 131_072


def test_a_length_that_the_model_lacks_is_refused_before_the_start(folder: Path) -> None:
    spec = spec_of(folder, max_model_len=131_073)
    why = too_large(needing(spec, "cuda", 121, option(spec, SPARK, {})), 121)
    assert lacking(why, "131,073 tokens", "131,072", "set max_model_len: 131072") == []
    beyond = spec_of(folder, max_model_len=131_073, extra_args=["--hf-overrides", "{}"])
    for longer, env in ((spec, {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "true"}), (beyond, {})):
        assert too_large(needing(longer, "cuda", 121, option(longer, SPARK, env)), 121) is None, env


def test_a_model_that_no_node_can_hold_is_told_what_would(folder: Path) -> None:
    spec = spec_of(folder, max_num_seqs=16)
    why = too_large(needing(spec, "cuda", 121, exact(option(spec, SPARK, {}))), 24, "this node")
    assert why is not None
    assert lacking(why, "The memory is too small: it needs", "this node", "24 GiB", "set max_model_len:") == []
    assert "tokens" in why
    assert too_large(needing(spec, "cuda", 20, exact(option(spec, SPARK, {}))), 121, "this node") is None
    assert "quantize: fp8" in advice(spec_of(folder, max_model_len=32_768, max_num_seqs=16), SPARK, {}, 19 * GIB)


def test_what_would_fit_is_said_of_the_nodes_that_were_asked_for(folder: Path) -> None:
    """18 GiB a node hold half of the weights and a shorter request, and not all of the weights beside an engine."""
    spec = spec_of(folder, tensor_parallel=2, max_num_seqs=16)
    known = exact(option(spec, SPARK, {}, ways=(2, 1)))
    why = too_large(needing(spec, "cuda", 121, known), 18, "each of 2 nodes")
    assert why is not None and "To make it fit: set max_model_len: " in why
    assert "max_model_len" not in advice(spec, SPARK, {}, 18 * GIB)
    shorter = int(re.findall(r"max_model_len: ([0-9]+)", why)[0])
    less = account(spec_of(folder, max_num_seqs=16, max_model_len=shorter), SPARK, {}, ways=(2, 1))
    assert less is not None and known.footprint is not None and less.least <= 18 * GIB < known.footprint.least
    # Three ranks cannot share its 32 heads: nothing of that kind would fit.
    assert advice(spec, SPARK, {}, 100 * GIB, (3, 1)) == ""


def test_what_an_entry_does_not_allow_itself_is_told(folder: Path) -> None:
    keys = {"max_model_len": 8192, "max_num_seqs": 16}
    known = of(folder, **keys)

    def refused(most_gib: int = 100, platform: str = "cuda", **more: Any) -> str | None:
        spec = spec_of(folder, **keys | more)
        found = exact(option(spec, machine(platform, 121 * GIB, 0), {}))
        return too_large(needing(spec, platform, 10, found), most_gib, "this node")

    least = known.least / GIB
    assert refused() is None and refused(memory_gib=least) is None
    # An account may be wrong by so much, and the engine measures.
    assert refused(memory_gib=least * 0.96) is None
    told = refused(memory_gib=least * 0.9)
    assert lacking(told, f"memory_gib: {least * 0.9:g}", f"{least:.1f} GiB", "set memory_gib:") == []
    assert refused(most_gib=40, kv_margin_gib=5) is None
    told = refused(most_gib=40, kv_margin_gib=25)
    assert told is not None and lacking(told, "this node", "40 GiB", "kv_margin_gib", "25") == []
    told = refused(kv_cache={"tokens": 4096})
    assert told is not None and lacking(told, "4,096 tokens", "8,192", "set kv_cache: {tokens: 8192}") == []
    told = refused(platform="cpu", max_model_len=32_768)
    assert told is not None and lacking(told, "CPU", "2.0 GiB", "32,768 tokens", "4.0 GiB") == []


@pytest.mark.parametrize(
    ("size", "way", "step"),
    [
        ({"bytes": "200GiB"}, "bytes", GIB // 10),
        ({"tokens": 3_000_000}, "tokens", 16),
        ({"sequences": 400}, "sequences", 1),
    ],
)
def test_of_a_cache_that_is_too_large_the_largest_that_fits_is_told(folder: Path, size: dict[str, Any], way: str, step: int) -> None:
    """The terms are the sum, the cache among them as its entry has it."""

    def refused(given: Any) -> str | None:
        spec = spec_of(folder, max_model_len=8192, max_num_seqs=16, kv_cache=given)
        found = exact(option(spec, SPARK, {}))
        return too_large(needing(spec, "cuda", 1, found), 30, "this node")

    why = refused(size)
    assert why is not None and f"(kv_cache: {spelled(kv_cache(size))}), " in why
    terms = why.partition(" needs at least ")[2].replace(spelled(kv_cache(size)), "").partition("; ")[0].partition(". ")[0]
    total, *parts = (float(found) for found in re.findall(r"([0-9.]+) GiB", terms))
    assert len(parts) == 4
    assert sum(parts) == pytest.approx(total, abs=1e-9)
    assert ("set memory_gib" in why) is False  # a node has no more than 30 GiB
    most = yaml.safe_load(re.findall(r"set kv_cache: (\{[^}]*\})", why)[0])
    assert list(most) == list(size) and refused(most) is None
    more = kv_cache(most)
    assert refused({**more, way: more[way] + step}) is not None


def facts(entrypoint: str | None) -> dict[str, Any]:
    return {"platform": "cuda", "entrypoint": entrypoint, "vllm": None}


def test_the_flags_of_a_models_vllm_are_asked_for_where_it_is_placed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM on this node is asked; for the values of keys alone only a kept answer counts."""
    asked: list[tuple[Path | None, Path, bool]] = []

    def refused(_flags: Any, _env: Any, runtime: Path | None, state: Path, *, ask: bool) -> tuple[str, ...]:
        asked.append((runtime, state, ask))
        return ()

    monkeypatch.setattr("sparkd.capacity.placed_entry.refused", refused)
    monkeypatch.setattr("sparkd.capacity.placed_entry.full_version_in", lambda _runtime: "0.32.0")
    config = Config.model_validate({"state_dir": tmp_path})
    for vllm, more in (("0.32.0", {}), ("0.33.0", {"extra_args": ["--seed", "1"]}), ("0.32.0", {"extra_args": ["--seed", "1"]})):
        refused_flags(spec_of(folder, max_model_len=8192, kv_cache={"sequences": 2}, **more), config, vllm, ask=True)
    assert asked == [(None, tmp_path, False), (None, tmp_path, True)]


def test_the_need_of_a_model(folder: Path, tmp_path: Path) -> None:
    config = Config.model_validate({"state_dir": tmp_path})
    sized = spec_of(folder, max_model_len=8192, kv_cache={"sequences": 2}, quantize="auto", max_num_seqs=16)
    found = requirement(sized, config, facts("e"), 100.0, 100.0)
    assert found.args.spec.quantize is None
    assert found.known is not None and found.known.cache is not None
    assert found.gib - 1 < (found.known.fixed + found.known.cache) / GIB <= found.gib
    with pytest.raises(RankError, match=r"vllm~=0\.32\.0 -c deploy/constraints\.txt"):
        requirement(sized, config, facts(None), 100.0, 100.0)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").touch()
    # Beside a model of the file, why there is none is told.
    config = config.model_copy(update={"models": {"m": spec_of(tmp_path / "m")}})
    for name, why in (("gone", "gone is not on"), ("empty", "empty is empty"), ("notes", r"notes .*config\.json")):
        with pytest.raises(ModelUnusable, match=why):
            requirement(spec_of(tmp_path / name), config, facts("e"), 100.0, 100.0)
