"""Where vLLM sizes its cache itself after all: what of the wish is kept, and that the rest is said."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from sparkd.errors import MissingSymbol
from tests.support.facts import facts
from tests.workers.kv.test_sizing import NEED, Machine, at_once, told
from workers.kv.arithmetic import GIB, CacheCosts
from workers.kv.settings import CacheSettings
from workers.kv.sizing import Sizing
from workers.vllm.kv.sized_worker import SizedWorker

__all__ = ["at_once"]  # a fixture
BLOCK = NEED.per_block


@pytest.mark.parametrize(
    ("settings", "counted", "limit", "says"),
    [
        ({}, True, None, ""),
        ({"bytes": 5 * GIB}, False, 5 * GIB, " 5.00"),
        ({"sequences": 3}, True, 3 * GIB + BLOCK, " 3.00"),
        ({"sequences": 3}, False, None, " sequences kv_cache"),
        # 33 GiB are taken by the engine; the smaller of both holds, in either order.
        ({"at_most_bytes": 6 * GIB, "reserved_bytes": 35 * GIB}, True, 2 * GIB, " 2.00"),
        ({"at_most_bytes": GIB, "reserved_bytes": 35 * GIB}, False, GIB, " 1.00"),
    ],
)
def test_what_can_be_kept_is_kept_and_the_rest_said(tmp_path, caplog, monkeypatch, settings, counted, limit, says):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    machine = Machine(40 * GIB, missing="GPUModelRunner._dummy_run")
    asked: list[int | None] = []

    def need() -> CacheCosts:
        if not counted:
            raise MissingSymbol("it is missing", symbol="vllm.v1.core.kv_cache_utils.get_kv_cache_groups")
        return NEED

    def stock(within: int | None) -> int:
        asked.append(within)
        return 36 * GIB

    known = CacheSettings(margin_bytes=8 * GIB, report=str(tmp_path / "report"), **settings)
    # A cache of a given size leaves plenty here: nothing would be rehearsed, and nothing be missing.
    machine.warm = lambda: int(bool(machine.rehearse(1.0)))  # type: ignore[method-assign]
    size = Sizing(machine, known, need, lambda: {"model": "m"}).determine(stock)
    assert asked == [limit]
    assert size == 32 * GIB, "the margin is left, whatever vLLM takes"
    lacks = "GPUModelRunner._dummy_run" if counted else "vllm.v1.core.kv_cache_utils.get_kv_cache_groups"
    assert (told(tmp_path)["phase"], facts(told(tmp_path)["why"])) == ("stock", f"{lacks}{says}")
    assert f"{lacks}{says}" in facts(caplog.text)


@pytest.mark.parametrize(("blocks", "fits"), [(512, True), (50 * 256, False)])
def test_blocks_that_vllm_was_told_to_take_do_not_over_commit(tmp_path, blocks, fits):
    """It takes them whatever it is told that there is."""
    machine = Machine(40 * GIB, missing="GPUModelRunner._dummy_run")
    machine.warm = lambda: int(bool(machine.rehearse(1.0)))  # type: ignore[method-assign]
    known = CacheSettings(margin_bytes=8 * GIB, report=str(tmp_path / "report"), blocks=blocks)
    sizing = Sizing(machine, known, lambda: NEED, lambda: {"model": "m"})
    if fits:
        assert sizing.determine(lambda _limit: 36 * GIB) == 32 * GIB
        assert facts(told(tmp_path)["why"]) == "GPUModelRunner._dummy_run 2.00 --num-gpu-blocks-override 512"
        return
    with pytest.raises(ValueError, match="margin") as raised:
        sizing.determine(lambda _limit: 36 * GIB)
    assert facts(raised.value) == "--num-gpu-blocks-override 12800 50.00 32.00 --num-gpu-blocks-override 8192"
    assert told(tmp_path)["phase"] == "refused"


class Worker:
    """vLLM's, as far as a cache is concerned."""

    allocated: ClassVar[list[Any]] = []

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self.allocated.append(kv_cache_config)


class Ours(SizedWorker, Worker): ...


@pytest.mark.parametrize("lacks", [True, False])
def test_a_cache_that_vllm_sized_is_allocated_without_what_its_release_lacks(monkeypatch, lacks):
    counts = "vllm.v1.core.kv_cache_utils.get_max_concurrency_for_kv_cache_config"

    def need() -> CacheCosts:
        if lacks:
            raise MissingSymbol("it is missing", symbol=counts)
        return NEED

    def requests_in(*_: Any) -> float:
        if lacks:
            raise MissingSymbol("it is missing", symbol=counts)
        return 3.0

    monkeypatch.setattr("workers.vllm.kv.sized_worker.requests_in", requests_in)
    worker, cache = Ours(), SimpleNamespace(kv_cache_groups=["full"])
    worker.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=8192))
    worker._sizing = Sizing(Machine(40 * GIB), CacheSettings(), need, lambda: {"model": "m"})
    size = worker._sizing.determine(lambda _limit: 4711)
    assert (size == 4711) is lacks
    worker.initialize_from_config(cache)
    assert Worker.allocated.pop() is cache
    assert (" 3.0 8192 " in facts(worker._sizing._sentence)) is not lacks
