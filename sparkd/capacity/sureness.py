"""Owns how sure a plan's numbers are: the weights and the cache each by themselves. Never counts a byte."""

from __future__ import annotations

from collections.abc import Collection

from sparkd.capacity.vllm_figures import EXACT, GUESS, KNOWN, Exact
from sparkd.checkpoint.quantization import SourceQuantization
from sparkd.models.architectures import is_checked
from sparkd.models.shape import Shape
from sparkd.vllm.unaccounted_args import CACHE, OTHER, WEIGHTS

_BEST_FIRST = (EXACT, KNOWN, GUESS)
# The ways in which checkpoints are quantized whose weights the tests compare with vLLM's
# (tests/sparkd/inquiry/test_known_architectures.py).
CHECKED_METHODS = frozenset({"fp8_block", "mxfp4"})


def of_weights(shape: Shape, source: SourceQuantization | None, exact: Exact, unknown: Collection[str] = ()) -> str:
    """source: how the checkpoint is quantized, None for one that is not. unknown: as sparkd.vllm.unaccounted_args.changed_by names it."""
    if exact.weight_bytes is not None and OTHER not in unknown:
        return EXACT
    is_counted = is_checked(shape) and (source is None or source.method in CHECKED_METHODS)
    return KNOWN if is_counted and not {WEIGHTS, OTHER} & set(unknown) else GUESS


def of_cache(shape: Shape, exact: Exact, unknown: Collection[str] = ()) -> str:
    """unknown: as for of_weights."""
    if exact.layout is not None and OTHER not in unknown:
        return EXACT
    return KNOWN if is_checked(shape) and not exact.doubtful and not {CACHE, OTHER} & set(unknown) else GUESS


def of_both(shape: Shape, source: SourceQuantization | None, exact: Exact, unknown: Collection[str] = ()) -> tuple[str, str, str]:
    """(sureness of the weights, sureness of the KV cache, the worse of the two); see of_weights and of_cache."""
    both = of_weights(shape, source, exact, unknown), of_cache(shape, exact, unknown)
    return *both, max(both, key=_BEST_FIRST.index)
