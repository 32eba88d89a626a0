"""Where vLLM sizes its cache itself after all: what of the wish is kept, and that the rest is said."""

from __future__ import annotations

import logging

import pytest

from tests.kv.test_sizing import NEED, Machine, at_once, told
from workers.kv.arithmetic import GIB, Need
from workers.kv.settings import Settings
from workers.kv.sizing import Sizing
from workers.kv.symbols import Missing

__all__ = ["at_once"]  # a fixture
BLOCK = NEED.per_block


@pytest.mark.parametrize(
    ("settings", "counted", "limit", "says"),
    [
        ({}, True, None, "sizes its KV cache itself. "),
        ({"bytes": 5 * GIB}, False, 5 * GIB, "itself, at most 5.00 GiB. "),
        ({"tokens": 16384}, True, 2 * GIB + BLOCK, "itself, at most 2.00 GiB. "),
        ({"sequences": 3}, True, 3 * GIB + BLOCK, "itself, at most 3.00 GiB. "),
        ({"tokens": 16384}, False, None, "itself; tokens of kv_cache cannot be kept. "),
        ({"sequences": 3}, False, None, "itself; sequences of kv_cache cannot be kept. "),
        ({"at_most_bytes": 6 * GIB}, True, 6 * GIB, "itself, at most 6.00 GiB. "),
        # 33 GiB are taken by the engine; the smaller of both holds, in either order.
        ({"at_most_bytes": 6 * GIB, "reserved_bytes": 35 * GIB}, True, 2 * GIB, "itself, at most 2.00 GiB. "),
        ({"at_most_bytes": GIB, "reserved_bytes": 35 * GIB}, False, GIB, "itself, at most 1.00 GiB. "),
    ],
)
def test_what_can_be_kept_is_kept_and_the_rest_said(tmp_path, caplog, monkeypatch, settings, counted, limit, says):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    machine = Machine(40 * GIB, missing="GPUModelRunner._dummy_run")
    asked: list[int | None] = []

    def need() -> Need:
        if not counted:
            raise Missing("vllm.v1.core.kv_cache_utils.get_kv_cache_groups")
        return NEED

    def stock(within: int | None) -> int:
        asked.append(within)
        return 36 * GIB

    known = Settings(margin_bytes=8 * GIB, report=str(tmp_path / "report"), **settings)
    # A cache of a given size leaves plenty here: nothing would be rehearsed, and nothing be missing.
    machine.warm = lambda: int(bool(machine.rehearse(1.0)))  # type: ignore[method-assign]
    size = Sizing(machine, known, need, lambda: {"model": "m"}).determine(stock)
    assert asked == [limit]
    assert size == 32 * GIB, "the margin is left, whatever vLLM takes"
    assert says in caplog.text
    assert told(tmp_path)["phase"] == "stock"
