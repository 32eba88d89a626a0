"""An entry that follows a refusal's cure is not refused again: a load, a check and a plan name no number that breaks another limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.capacity.advice import Cure, FitRefusal, refusal, too_large
from sparkd.capacity.weights import inventory
from sparkd.checkpoint import read_checkpoint
from sparkd.checkpoint.shape import shape_of
from sparkd.config.config import parse_model
from sparkd.config.kv_cache import written
from sparkd.config.model import ModelConfig
from sparkd.hardware import machine
from sparkd.units import GIB
from tests.support.accounts import needed_gib, needing, option, options
from tests.support.checkpoints import LLAMA_8B, write
from tests.support.published_tensors import tensors_of

NODE_GIB = 121
NODE = machine("cuda", NODE_GIB * GIB, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LLAMA_8B | {"num_hidden_layers": 8}
    return write(tmp_path_factory.mktemp("llama"), config, tensors_of(config))


CACHES = st.one_of(
    st.none(),
    st.builds(lambda mib: {"bytes": f"{mib}MiB"}, st.integers(1, 64 << 10)),
    st.builds(lambda tokens: {"tokens": tokens}, st.integers(1, 1 << 20)),
    st.builds(lambda count: {"sequences": count}, st.integers(1, 64)),
    st.builds(lambda count, at: {"sequences": count, "at": at}, st.integers(1, 64), st.integers(1, 131_072)),
    st.builds(lambda blocks: {"blocks": blocks}, st.integers(1, 1 << 16)),
)
ENTRIES = st.fixed_dictionaries(
    {"max_model_len": st.sampled_from([2048, 32_768, 131_072]), "cache": CACHES},
    optional={
        "memory_gib": st.integers(2, 40),
        "kv_margin_gib": st.integers(0, 20),
        "quantize": st.sampled_from(["fp8", "nvfp4"]),
        "max_num_seqs": st.sampled_from([1, 16, 512]),
        "tensor_parallel": st.sampled_from([1, 2]),
    },
)


def cache_keys(cache: dict[str, Any] | None) -> dict[str, Any]:
    """A size in blocks is a flag."""
    if cache and "blocks" in cache:
        return {"extra_args": ["--num-gpu-blocks-override", str(cache["blocks"])]}
    return {"kv_cache": cache} if cache else {}


def parsed(folder: Path, keys: dict[str, Any]) -> ModelConfig | None:
    """None where sparkd refuses what the entry says before it knows the model."""
    more = cache_keys(keys.get("cache"))
    if "extra_args" in more:
        keys = {key: value for key, value in keys.items() if key != "kv_margin_gib"}
    entry = {"model": str(folder), **{key: value for key, value in keys.items() if key != "cache"}, **more}
    try:
        return parse_model("m", entry, over_admin=False)
    except ValueError:
        return None


def refused(spec: ModelConfig, most_gib: int) -> FitRefusal | None:
    ways = (spec.tensor_parallel if isinstance(spec.tensor_parallel, int) else 1, 1)
    found = option(spec, NODE, {}, ways=ways)
    gib = needed_gib(spec, "cuda", NODE_GIB, {}, most_gib, None if found is None else found.known)
    return too_large(needing(spec, "cuda", gib, found), most_gib, "this node")


def followed(keys: dict[str, Any], cure: Cure) -> dict[str, Any]:
    """The keys with what an operator copies from the sentence."""
    made = dict(keys)
    for key, value in cure.settings.items():
        if key != "kv_cache":
            made[key] = value
        elif "blocks" in value:
            made["cache"] = value
        else:
            made["cache"] = yaml.safe_load(written(key, value))[key]
    return made


def test_an_entry_that_follows_the_cure_of_a_load_is_not_refused_again(folder: Path) -> None:
    cures = list[Cure]()

    @settings(max_examples=150, deadline=None)
    @given(ENTRIES, st.integers(4, 60))
    def loads(keys: dict[str, Any], most_gib: int) -> None:
        spec = parsed(folder, keys)
        found = None if spec is None else refused(spec, most_gib)
        for cure in () if found is None else (found.cure,):
            again = parsed(folder, followed(keys, cure)) if cure.settings else None
            if again is not None:
                cures.append(cure)
                second = refused(again, most_gib)
                assert second is None, f"{cure} of\n{found and found.message}\nends in\n{second.message}"

    loads()
    assert len(cures) > 10, "hardly any cure could be followed"


def test_a_plan_that_is_made_again_by_its_cure_has_a_choice(folder: Path) -> None:
    checkpoint = read_checkpoint(str(folder))
    model = inventory(checkpoint, shape_of(checkpoint.config))
    cures = list[Cure]()

    @settings(max_examples=60, deadline=None)
    @given(
        st.sampled_from([2048, 32_768, 131_072, 200_000]),
        CACHES,
        st.integers(6, 60),
        st.sampled_from(["bf16", "nvfp4"]),
        st.sampled_from([((1, 1),), ((2, 1),)]),
    )
    def is_planned(length: int, cache: dict[str, Any] | None, most_gib: int, quantize: str, ways: tuple[tuple[int, int], ...]) -> None:
        node = machine("cuda", most_gib * GIB, 0)
        keys: dict[str, Any] = {"max_model_len": length, "max_num_seqs": 16, "quantize": quantize, **cache_keys(cache)}
        found = refusal(options(model, node, ways=ways, **keys), 1)
        for cure in () if found is None else (found.cure,):
            if cure.settings:
                cures.append(cure)
                size = cure.settings.get("kv_cache", cache)
                followed = {key: value for key, value in cure.settings.items() if key in ("max_model_len", "quantize")}
                second = refusal(options(model, node, ways={(1, 1), *ways}, **{**keys, **followed, **cache_keys(size)}), 1)
                # A length is first brought within what the model has, and then what the memory holds.
                assert second is None or (found is not None and found.cause == "length" != second.cause), f"{cure} of {found}"

    is_planned()
    assert len(cures) > 10, "hardly any cure could be followed"
