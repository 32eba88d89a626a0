"""Owns the ways in which an entry's model may be served: in the format of the entry, or for `quantize: auto` in each that comes into
question, best first. Counts nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain

from sparkd.capacity.fit import FORMATS, recipes
from sparkd.capacity.headers import Headers, headers_here
from sparkd.capacity.mixes import mixes_below, mixes_of
from sparkd.capacity.weights import FormattedModel
from sparkd.checkpoint.prequantized import prequantized
from sparkd.config.engine_args import EngineArgs
from sparkd.config.quantize import AUTO
from sparkd.errors import CheckpointError, ConfigError
from workers.quantization.best_wish import BestWish, best_of
from workers.quantization.recipe import AS_IT_IS


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model in one of the ways that come into question. args: the entry in this format; model: the weights in it."""

    args: EngineArgs
    headers: Headers
    model: FormattedModel


def candidate_of(args: EngineArgs, headers: Headers) -> Candidate | None:
    """The entry in its own format, as stored for `auto`; None where the weights cannot have it: the engine says why, with the tensor's
    name."""
    if args.recipe is None:
        return None
    try:
        return Candidate(args, headers, headers.model.formatted(args.recipe))
    except (CheckpointError, ConfigError):
        return None


def candidates_of(args: EngineArgs, headers: Headers, *, beside: bool = False) -> tuple[Candidate, ...]:
    """The entry's own format alone; for `best` its mixes; for `quantize: auto` as it is stored, then as others have quantized it, who had
    data to calibrate with, then by ourselves (sparkd.capacity.fit.rank), then in mixes that are smaller than any one format.

    beside: with what this machine has of the model quantized already. Raises ConfigError where no mix is as small as the entry asks for.
    """
    ways: Iterable[tuple[EngineArgs, Headers]] = ((args, headers),)
    if args.quantize == AUTO:
        ways = chain(_ways(args, headers, beside=beside), _smaller(args, headers))
    elif (wish := best_of(args.quantize)) is not None:
        ways = _mixes(args, headers, wish)
    return tuple(candidate for way in ways if (candidate := candidate_of(*way)) is not None)


def _ways(args: EngineArgs, headers: Headers, *, beside: bool) -> Iterator[tuple[EngineArgs, Headers]]:
    plain = args.undecided()
    yield plain, headers
    if beside:
        yield from _neighbours(args, headers)
    yield from ((plain.quantized(recipe), headers) for _, recipe in recipes(headers.model, None) if recipe.quantizes)


def _smaller(args: EngineArgs, headers: Headers) -> Iterator[tuple[EngineArgs, Headers]]:
    with suppress(CheckpointError):  # the engine says why, with the tensor's name
        for recipe in mixes_below(headers.model, FORMATS, args.tensor_parallel or 1):
            yield args.undecided().quantized(recipe), headers


def _mixes(args: EngineArgs, headers: Headers, wish: BestWish) -> Iterator[tuple[EngineArgs, Headers]]:
    with suppress(CheckpointError):  # the engine says why, with the tensor's name
        for recipe in mixes_of(headers.model, wish, args.tensor_parallel or 1):
            yield args.quantized(recipe), headers


def _neighbours(args: EngineArgs, headers: Headers) -> Iterator[tuple[EngineArgs, Headers]]:
    """Each checkpoint of the same model that this machine has in four or eight bits. Trust in code belongs to the entry's own repository:
    with it there is none."""
    if args.trusts_code:
        return
    for name, _ in prequantized(args.model, headers.model.checkpoint, {**os.environ, **args.env}):
        other = replace(args, model=name, revision=None, quantize=None, recipe=AS_IT_IS)
        if (there := headers_here(other)) is not None:
            yield other, there
