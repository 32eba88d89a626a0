"""The refusals of an engine's own parts: of the KV cache, which says its sum and what would fit, and of the loader and its cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparkd.checkpoint import SourceQuantization
from sparkd.errors import SparkdError
from tests.support.checkpoints import checkpoint_of, layered
from workers.kv.agreement import Vote, course_of
from workers.kv.arithmetic import GIB, CacheCosts, CacheDoesNotFit, Demand, Reserved, SizeBounds, pool, too_little
from workers.quantization.recipe import QuantizationRecipe

_NEED = CacheCosts(per_request=4 * GIB, least=4 * GIB + GIB // 64, max_model_len=32768)
_DEMAND = Demand(graphs=2 * GIB, peak=4 * GIB, weights=60 * GIB)
_GRAPHS = Demand(graphs=6 * GIB, peak=GIB, weights=8 * GIB)
_W = (128, 128)
_PROJECTIONS = {"self_attn.q_proj.weight": (576, 576), "self_attn.k_proj.weight": (192, 576), "self_attn.o_proj.weight": (576, 576)}
# Free GiB, demand and bounds of a start that is refused.
_STARTS: Mapping[str, tuple[float, Demand, SizeBounds]] = {
    "nothing given": (10, _DEMAND, SizeBounds()),
    "nothing left": (2, _DEMAND, SizeBounds()),
    "graphs that are too large": (8, _GRAPHS, SizeBounds()),
    "a size that is too large": (20, _DEMAND, SizeBounds(asked=13 * GIB)),
    "a size that is too large for one request": (10, _DEMAND, SizeBounds(asked=13 * GIB)),
    "a size below one request": (40, _DEMAND, SizeBounds(asked=GIB)),
    "a limit below one request": (40, _DEMAND, SizeBounds(at_most=GIB)),
    "a limit and no room": (10, _DEMAND, SizeBounds(at_most=GIB)),
    "too many blocks": (20, _DEMAND, SizeBounds(asked=1000 * _NEED.per_block, by_blocks=True)),
    "too few blocks": (40, _DEMAND, SizeBounds(asked=100 * _NEED.per_block, by_blocks=True)),
    "a reservation": (40, _DEMAND, SizeBounds(reserved=Reserved(70 * GIB, 61 * GIB))),
    "a reservation that two ranks share": (40, _DEMAND, SizeBounds(reserved=Reserved(80 * GIB, 62 * GIB, 2))),
}
_VOTES = {
    "without a profile": (Vote(0), Vote(1, learned=False)),
    "without memory to spare": (Vote(0, learned=False), Vote(1, learned=False, plenty=False)),
    "with setbacks": (Vote(0), Vote(1, setbacks=2)),
}
_RECIPES: tuple[Any, ...] = (
    "nf4-g16",
    4,
    {"formt": "nvfp4"},
    {"format": "int4", "group_size": "64"},
    {"format": "nvfp4", "group_size": 64},
    {"layers": {"o_proj": {"format": "int4-g32", "group_size": 64}}},
    {"layers": 3},
    {"layers": ["o_proj"]},
    {"layers": [{"match": "o_proj"}]},
    {"layers": [{"format": "fp8"}]},
    {"layers": [{"match": "a", "format": "fp8", "prio": 1}]},
    {"layers": [{"match": "a", "format": "fp8", "priority": "1"}]},
    {"layers": {"class:experts": "fp8"}},
    {"layers": {"re:.*_proj$": "fp8"}},
    {"layers": {"re:(a|b)+": "fp8"}},
    {"layers": {"mtp.**.o_proj": "fp8"}},
    {"layers": {"a..b": "fp8"}},
    {"layers": {"[qk_proj": "fp8"}},
    {"layers": {"experts.3.down_proj": "fp8"}},
    {"keep": [None]},
)
# A recipe, and the tensors of a checkpoint that cannot have it, or not all of it.
_CHECKPOINTS: tuple[tuple[Any, Mapping[str, Any], str | None], ...] = (
    ({"layers": {"q_proj": "fp8-block"}}, layered(1, _PROJECTIONS), None),
    ("fp8-block", layered(1, _PROJECTIONS), None),
    ({"layers": {"lm_head": "fp8-block"}}, {"lm_head.weight": ("BF16", _W)}, None),
    ({"format": "nvfp4", "layers": {"q_proj": "fp8", "k_proj": "mxfp4", "nope": "fp8"}}, layered(1, dict.fromkeys(_PROJECTIONS, _W)), None),
    ({"layers": {"mlp.gate": "fp8"}}, layered(1, {"mlp.gate.weight": _W}), None),
    ("nvfp4", layered(1, {"mlp.input_linear.weight": (4, *_W)}), None),
    ("nvfp4", {"model.layers.0.mlp.experts.gate_up_proj": ("F8_E4M3", (4, *_W))}, "fp8_block"),
    ("nvfp4", layered(1, {"self_attn.o_proj.weight": _W}), "awq"),
)


def kv(_folder: Path) -> str:
    """Each way in which a cache is refused; and how ranks disagree."""
    rows = []
    for title, (free, demand, bounds) in _STARTS.items():
        try:
            pool(int(free * GIB), demand, GIB, _NEED, bounds)
        except CacheDoesNotFit as refused:
            rows.append(f"{title}:\n{refused}\n")
    rows.append(f"too little to begin:\n{too_little(GIB // 4, GIB // 2, replace(_NEED, weight_bits=8), 33 * GIB)}\n")
    rows += [f"one rank {title}:\n{course_of(votes).why}\n" for title, votes in _VOTES.items()]
    return "\n".join(rows)


def loader(_folder: Path) -> str:
    """Each fault of a recipe, and what a checkpoint cannot have of one."""
    return "\n".join([*_faults(), *_unmet()])


def _faults() -> Iterator[str]:
    for value in _RECIPES:
        try:
            QuantizationRecipe.parse(value)
        except SparkdError as error:
            yield f"quantize: {value}\n{error.message}\n"


def _unmet() -> Iterator[str]:
    for value, tensors, method in _CHECKPOINTS:
        stored = None if method is None else SourceQuantization(method)
        checkpoint = checkpoint_of(tensors) if stored is None else checkpoint_of(tensors, quantization=stored)
        try:
            messages = QuantizationRecipe.parse(value).assign(checkpoint).adjustments
        except SparkdError as error:
            messages = (error.message,)
        yield "\n".join([f"quantize: {value}", *messages, ""])
