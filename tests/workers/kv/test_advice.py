"""Whoever follows a refusal's cure is not refused again: every number that is offered satisfies all limits that are known by then."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import yaml

from sparkd.schema.kv_cache import kv_cache
from workers.kv.advice import OTHER_PROGRAMS, Cure, written
from workers.kv.arithmetic import FOUR_BITS, GIB, CacheCosts, CacheDoesNotFit, Demand, Reserved, SizeBounds, pool
from workers.kv.request import CacheRequest
from workers.kv.settings import CacheSettings


@dataclass(frozen=True)
class Start:
    """One start of an engine, as far as its cache is concerned. state: bytes of a request that its length does not change."""

    room: int
    demand: Demand
    need: CacheCosts
    settings: CacheSettings = field(default_factory=CacheSettings)
    reserved: Reserved | None = None
    margin: int = GIB

    def tried(self) -> int:
        """Bytes of the cache, or the sentence."""
        wish = CacheRequest(self.settings, lambda: 0)
        blocks = self.settings.blocks is not None
        size = wish.asked(self.need)
        # An operator's own size goes before memory_gib; sparkd hands over one or the other.
        reserved = self.reserved if size is None else None
        made = pool(self.room, self.demand, self.margin, self.need, SizeBounds(size, wish.at_most(), reserved, blocks, wish.asked))
        return made.bytes


def need_of(length: int, per_token: int, state: int, block: int, **more: Any) -> CacheCosts:
    def of(tokens: int) -> int:
        return -(-(state + per_token * tokens) // block) * block

    return CacheCosts(of(length), of(length) + block, length, of=of, **more)


def followed(start: Start, cure: Cure) -> Start | None:
    """As if started again by this advice; None where it names no number."""
    made, needed = start, cure.settings
    if cure.deed == OTHER_PROGRAMS:
        made = replace(made, room=1 << 50)
    elif cure.deed:
        return None
    if size := needed.get("kv_cache"):
        made = replace(made, settings=CacheSettings(**(size if "blocks" in size else read(size))))
    if tokens := needed.get("max_model_len"):
        made = replace(made, need=start.need.shortened(tokens))
    if start.reserved is not None and "memory_gib" in needed:
        made = replace(made, reserved=replace(start.reserved, bytes=int(needed["memory_gib"] * GIB)))
    if batch := needed.keys() & {"max_num_batched_tokens", "max_num_seqs"}:
        assert batch
        tokens, sequences = needed.get("max_num_batched_tokens", start.need.batch_tokens), needed.get("max_num_seqs", start.need.sequences)
        prefill = start.demand.prefill * tokens // start.need.batch_tokens
        made = replace(made, demand=start.demand.with_peaks(prefill, start.demand.decoding * sequences // start.need.sequences))
    if "enforce_eager" in needed:
        made = replace(made, demand=replace(start.demand, graphs=0))
    if "quantize" in needed:
        freed = int(start.demand.weights * (1 - FOUR_BITS / 16))
        made = replace(made, room=start.room + freed)
        if start.reserved is not None:
            made = replace(made, reserved=replace(start.reserved, taken=start.reserved.taken - freed * start.reserved.ranks))
    return made


def read(size: dict[str, int]) -> dict[str, int]:
    """A size as sparkd reads it from an entry in which the operator has written what the sentence says."""
    again: dict[str, int] = kv_cache(yaml.safe_load(written("kv_cache", size))["kv_cache"])
    return again


def check(start: Start) -> list[Cure]:
    """The advice that was followed."""
    try:
        start.tried()
    except CacheDoesNotFit as refused:
        cures, sentence = refused.cures, str(refused)
    else:
        return []
    found = []
    for cure in cures:
        again = followed(start, cure)
        if again is None:
            continue
        try:
            again.tried()
        except CacheDoesNotFit as second:
            raise AssertionError(f"{cure} of\n{sentence}\nends in\n{second}") from None
        found.append(cure)
    return found


MIB = 1 << 20
LINEAR = need_of(32768, 128 << 10, 0, 16 * MIB, batch_tokens=8192, sequences=256)  # 4 GiB
# As much again whatever its length: tokens of a shorter request cost more each.
STATE = need_of(32768, 128 << 10, 4 * GIB, 16 * MIB, batch_tokens=8192, sequences=256)
BATCH = Demand(graphs=2 * GIB, weights=8 * GIB).with_peaks(4 * GIB, 2 * GIB)


@pytest.mark.parametrize(
    ("start", "settings"),
    [
        (Start(int(13.48 * GIB), Demand(), LINEAR, CacheSettings(bytes=20 * GIB)), {"kv_cache": {"bytes": int(12.4 * GIB)}}),
        (
            Start(int(1.997 * GIB), Demand(), LINEAR, CacheSettings(bytes=20 * GIB)),
            {"kv_cache": {"bytes": int(0.9 * GIB)}, "max_model_len": 7168},
        ),
        # 22,000 tokens of long requests are 5.4 GiB, and of shorter ones more than there is room for; a size in bytes does not grow.
        (
            Start(int(6.5 * GIB), Demand(), STATE, CacheSettings(tokens=22_000)),
            {"kv_cache": {"bytes": int(5.5 * GIB)}, "max_model_len": 12_032},
        ),
        # The machine lacks room, and so does the limit: either alone would not do.
        (Start(7 * GIB, BATCH, LINEAR, CacheSettings(at_most_bytes=GIB)), {"quantize": "nvfp4", "kv_cache": {"bytes": int(4.1 * GIB)}}),
        (
            Start(40 * GIB, BATCH, LINEAR, CacheSettings(at_most_bytes=GIB), Reserved(10 * GIB, 9 * GIB)),
            {"memory_gib": 20.1, "kv_cache": {"bytes": int(4.1 * GIB)}},
        ),
    ],
)
def test_a_number_satisfies_every_limit_that_is_known(start: Start, settings: dict[str, Any]) -> None:
    assert settings in [cure.settings for cure in check(start)]
