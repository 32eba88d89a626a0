"""The bench's program: what it reads of a plan that the daemon makes."""

from __future__ import annotations

from typing import Any

import httpx

from sparkd.bench.__main__ import _predicted
from sparkd.bench.client import Client
from sparkd.bench.result import Predicted
from sparkd.capacity.plan import option_json
from tests.support.accounts import options
from tests.support.checkpoints import dense
from tests.support.inventories import known
from tests.support.published_tensors import tensors_of


async def predicted(status: int, answer: dict[str, Any]) -> Predicted | None:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, json=answer))
    async with Client("http://127.0.0.1:4000", "", transport) as client:
        return await _predicted(client, "m")


async def test_a_bench_notes_what_a_plan_predicts() -> None:
    best = options(known(dense(), tensors_of(dense())))[0]
    found = best.footprint

    assert found is not None and found.decode_tokens_s and found.first_load_s and found.weights.active_bytes
    assert await predicted(200, {"choice": option_json(best)}) == Predicted(
        decode_tokens_per_s=found.decode_tokens_s,
        first_load_s=found.first_load_s,
        next_load_s=found.next_load_s,
        active_bytes=found.weights.active_bytes,
    )


async def test_a_model_without_a_plan_is_measured_all_the_same() -> None:
    assert await predicted(200, {"choice": None}) is None
    assert await predicted(422, {"error": {"message": "It does not fit.", "code": "does_not_fit"}}) is None
