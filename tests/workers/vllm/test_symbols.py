"""A release of vLLM that lacks what sparkd uses: each symbol of the table in turn, and what is said and done without it."""

from __future__ import annotations

import ast
import importlib
import json
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import workers.kv
from sparkd.errors import MissingSymbol
from tests.support.facts import facts
from tests.support.late import Late
from tests.workers.kv.test_sizing import NEED, STOCK, Machine, at_once
from workers import plugin
from workers.kv.arithmetic import GIB, Demand
from workers.kv.settings import CacheSettings
from workers.kv.sizing import Sizing
from workers.vllm import symbols
from workers.vllm.kv import rehearsal
from workers.vllm.symbols import CACHE, MEDIA, OTHERWISE, TABLE, method, symbol

__all__ = ["at_once"]  # a fixture
FOLDER = Path(symbols.__file__).parent
# It stands in for vLLM's own platform before anything of vLLM is imported.
STANDS_IN = "cuda_stand_in.py"
TREES = {path: ast.parse(path.read_text()) for path in sorted(FOLDER.rglob("*.py"))}
BUILT_ON = {"cpu": ("SparkCPUWorker", "CPUWorker"), "cuda": ("SparkWorker", "Worker")}


@pytest.fixture(autouse=True, scope="module")
def vllm() -> None:
    """vLLM's workers with all that they import."""
    assert Late("vllm.v1.worker.cpu_worker").CPUWorker and Late("vllm.v1.worker.gpu_worker").Worker


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


def _take_away(monkeypatch: pytest.MonkeyPatch, name: str, *, module: bool = False) -> None:
    """module: the whole module is gone, else its attribute."""
    for home in TABLE[name].homes:
        monkeypatch.setitem(sys.modules, home, None if module else ModuleType(home))


@pytest.mark.parametrize("name", sorted(name for name, row in TABLE.items() if row.without != OTHERWISE))
def test_the_installed_vllm_has_it(name: str) -> None:
    assert symbol(name) is not None


@pytest.mark.parametrize("name", sorted(TABLE))
def test_each_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _take_away(monkeypatch, name, module=True)
    with pytest.raises(MissingSymbol, match=r"It works with 0\.32 and 0\.33;") as raised:
        symbol(name)
    assert raised.value.symbol.startswith(TABLE[name].homes[0]) and raised.value.symbol in raised.value.message
    if TABLE[name].attribute != "":
        _take_away(monkeypatch, name)
        with pytest.raises(MissingSymbol, match=raised.value.symbol):
            symbol(name)


def test_one_that_has_moved_is_found_in_its_older_home(monkeypatch: pytest.MonkeyPatch) -> None:
    newer, older = TABLE["get_kv_cache_groups"].homes
    for home in (newer, older):
        monkeypatch.setitem(sys.modules, home, ModuleType(home))
    sys.modules[older].get_kv_cache_groups = print  # type: ignore[attr-defined]
    assert symbol("get_kv_cache_groups") is print


def test_vllm_is_met_through_the_table_alone() -> None:
    imports, asked = set(), set()
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [a.name for a in getattr(node, "names", ()) if hasattr(a, "name")]
            )
            if isinstance(node, ast.Import | ast.ImportFrom) and any(name.partition(".")[0] == "vllm" for name in names):
                imports.add(path.name)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("symbol", "has"):
                asked |= {one.value for one in node.args if isinstance(one, ast.Constant)}
    assert imports == {STANDS_IN}
    assert asked <= TABLE.keys(), "the table has a row for each"


class Own:
    """A worker of the platform's."""

    def __init__(self, vllm_config: Any, rank: int, **_more: Any) -> None:
        self.cache = vllm_config.cache_config
        self.rank = rank


class Platform:
    def check_and_update_config(self, vllm_config: Any) -> None:
        assert vllm_config.parallel_config.worker_cls == "auto"
        vllm_config.parallel_config.worker_cls = f"{__name__}.Own"


@pytest.mark.parametrize("file", BUILT_ON)
@pytest.mark.parametrize(("settings", "size", "says"), [({"bytes": 5 * GIB}, 5 * GIB, "5.00"), ({}, None, "gpu_memory_utilization")])
def test_vllms_own_worker_runs_where_what_ours_is_built_on_is_missing(monkeypatch, tmp_path, caplog, file, settings, size, says):
    ours, base = BUILT_ON[file]
    monkeypatch.delitem(sys.modules, f"workers.vllm.kv.{file}", raising=False)
    monkeypatch.delattr(importlib.import_module("workers.vllm.kv"), file, raising=False)
    _take_away(monkeypatch, base)
    found = getattr(workers.kv, ours)
    assert f"workers.vllm.kv.{file}" not in sys.modules, "it could be imported after all"
    monkeypatch.setattr("vllm.platforms.current_platform", Platform())
    monkeypatch.setenv("SPARKD_KV", json.dumps({**settings, "report": str(tmp_path / "report")}))
    config = SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None), parallel_config=SimpleNamespace(worker_cls="workers.kv.SparkWorker")
    )
    made = found(vllm_config=config, rank=2)
    assert isinstance(made, Own)
    assert made.cache.kv_cache_memory_bytes == size
    assert config.parallel_config.worker_cls == "workers.kv.SparkWorker", "the engine's own configuration is as it was"
    report = json.loads((tmp_path / "report.tp2").read_text())["cache"]
    assert (report["phase"], report["rank"]) == ("stock", 2)
    for words in (report["why"], caplog.text):
        assert f".{base})" in words and says in words


def _machine(ask: Any) -> Machine:
    class Asking(Machine):
        def rehearse(self, scale: float) -> Demand:
            ask()
            return super().rehearse(scale)

    return Asking(40 * GIB)


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.without == CACHE])
def test_what_is_asked_for_in_a_rehearsal_is_missing(monkeypatch, caplog, name):
    _take_away(monkeypatch, name)
    size = Sizing(_machine(lambda: symbol(name)), CacheSettings(), lambda: NEED, dict).determine(lambda _limit: STOCK)
    assert size == STOCK
    assert f"{TABLE[name].homes[0]}.{name}" in facts(caplog.text)


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.without == MEDIA])
def test_without_a_registry_of_media_vllm_starts_all_the_same(monkeypatch, caplog, name):
    _take_away(monkeypatch, name)
    plugin._hush_media()
    assert TABLE[name].homes[0] in caplog.text


def test_a_method_that_is_missing_is_named():
    with pytest.raises(MissingSymbol, match=r"SimpleNamespace\._dummy_run"):
        method(SimpleNamespace(), "_dummy_run")


@pytest.mark.parametrize("lacks", ["_init_minimal_kv_cache_for_profiling", "_cleanup_profiling_kv_cache"])
def test_a_runner_that_lacks_a_method_for_a_small_cache_is_named(lacks):
    known = {"_init_minimal_kv_cache_for_profiling", "_cleanup_profiling_kv_cache"} - {lacks}
    runner = SimpleNamespace(**dict.fromkeys(known, print), compilation_config=None)
    with pytest.raises(MissingSymbol, match=lacks), rehearsal.minimal_cache(runner):
        pass
