"""Whoever follows a refusal's cure is not refused again: every number that is offered satisfies all limits that are known by then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

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


_MIB = 1 << 20
_bytes = st.integers(0, 24 * 1024).map(lambda mib: mib * _MIB)


@st.composite
def starts(draw: Callable[..., Any]) -> Start:
    length = draw(st.sampled_from([4096, 32768, 131072]))
    state = draw(st.sampled_from([0, 0, 37 * _MIB, GIB]))
    block = draw(st.sampled_from([_MIB, 3 * _MIB + 4096, 16 * _MIB]))
    need = need_of(
        length,
        draw(st.integers(1, 160)) * 1024,
        state,
        block,
        batch_tokens=8192,
        sequences=draw(st.sampled_from([16, 256])),
        lookahead=draw(st.sampled_from([0, 3])),
    )
    demand = Demand(draw(st.sampled_from([0, GIB, 3 * GIB])), 0, 0, draw(_bytes)).with_peaks(
        draw(_bytes) // 4 + _MIB, draw(_bytes) // 4 + _MIB
    )
    sizes = st.sampled_from(["auto", "bytes", "tokens", "sequences", "at", "blocks", "at_most", "reserved", "both"])
    how = draw(sizes)
    reserved = None
    asked = CacheSettings()
    if how == "bytes":
        asked = CacheSettings(bytes=max(1, draw(_bytes)))
    elif how == "tokens":
        asked = CacheSettings(tokens=draw(st.integers(1, 4 * length)))
    elif how == "sequences":
        asked = CacheSettings(sequences=draw(st.integers(1, 6)))
    elif how == "at":
        asked = CacheSettings(sequences=draw(st.integers(1, 6)), at=draw(st.integers(1, 2 * length)))
    elif how == "blocks":
        asked = CacheSettings(blocks=draw(st.integers(1, 4096)))
    if how in ("at_most", "both"):
        asked = CacheSettings(at_most_bytes=max(1, draw(_bytes)))
    if how in ("reserved", "both"):
        taken = demand.weights + draw(st.integers(0, 4096)) * _MIB
        reserved = Reserved(draw(st.integers(1, 64)) * GIB, taken, draw(st.sampled_from([1, 2])))
    return Start(draw(_bytes), demand, need, asked, reserved)


def test_an_advice_that_is_followed_is_no_reason_for_another_refusal() -> None:
    cures = list[Cure]()

    @settings(max_examples=120, deadline=None)
    @given(starts())
    def is_started(start: Start) -> None:
        cures.extend(check(start))

    is_started()
    assert len(cures) > 10, "hardly any cure could be followed"


LINEAR = need_of(32768, 128 << 10, 0, 16 * _MIB, batch_tokens=8192, sequences=256)  # 4 GiB
# As much again whatever its length: tokens of a shorter request cost more each.
STATE = need_of(32768, 128 << 10, 4 * GIB, 16 * _MIB, batch_tokens=8192, sequences=256)
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
