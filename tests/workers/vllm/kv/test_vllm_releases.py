"""A release of vLLM that lacks what sizing needs: each symbol in turn, found by reading what workers/kv asks for."""

from __future__ import annotations

import ast
import importlib.util
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import workers.kv
from tests.support.facts import facts
from tests.support.late import Late
from tests.workers.kv.test_sizing import NEED, STOCK, Machine, at_once
from workers.kv import rehearsal, symbols
from workers.kv.arithmetic import GIB, Demand
from workers.kv.settings import CacheSettings
from workers.kv.sizing import Sizing
from workers.vllm.kv.costs import Missing, imported

__all__ = ["at_once"]  # a fixture
FOLDER = Path(workers.kv.__file__).parent
TREES = {path.stem: ast.parse(path.read_text()) for path in sorted(FOLDER.glob("*.py"))}
# Where a class statement needs its base; everything else asks by `imported`, `function` or `method`.
BUILT_ON = {"cpu": "SparkCPUWorker", "cuda": "SparkWorker"}


def _statements() -> Iterator[tuple[str, str, str]]:
    """(file, module, name) of every import statement of vLLM's."""
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                yield from ((file, str(node.module), alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((file, alias.name, "") for alias in node.names if alias.name.partition(".")[0] == "vllm")


def _asked(name: str) -> Iterator[tuple[Any, ...]]:
    """The constant arguments of every call of symbols.NAME."""
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
                yield tuple(one.value for one in node.args if isinstance(one, ast.Constant))


@pytest.fixture(autouse=True, scope="module")
def vllm() -> None:
    """vLLM's workers with all that they import."""
    assert Late("vllm.v1.worker.cpu_worker").CPUWorker and Late("vllm.v1.worker.gpu_worker").Worker


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


class Own:
    """A worker of the platform's."""

    def __init__(self, vllm_config: Any, rank: int, **_more: Any) -> None:
        self.cache = vllm_config.cache_config
        self.rank = rank


class Extension:
    def extended(self) -> int:
        return self.rank + 40  # type: ignore[attr-defined,no-any-return]


class Platform:
    name = "Own"

    def check_and_update_config(self, vllm_config: Any) -> None:
        assert vllm_config.parallel_config.worker_cls == "auto"
        vllm_config.parallel_config.worker_cls = f"{__name__}.{self.name}"


def _hidden(monkeypatch: pytest.MonkeyPatch, file: str, module: str, name: str) -> type:
    """What vLLM finds as our worker class where the symbol is missing."""
    monkeypatch.delitem(sys.modules, f"workers.kv.{file}", raising=False)
    monkeypatch.delattr(workers.kv, file, raising=False)
    monkeypatch.delattr(importlib.import_module(module), name)
    found: type = getattr(workers.kv, BUILT_ON[file])
    assert f"workers.kv.{file}" not in sys.modules, "it could be imported after all"
    return found


def _config() -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None), parallel_config=SimpleNamespace(worker_cls="workers.kv.SparkWorker")
    )


@pytest.mark.parametrize(("file", "module", "name"), [one for one in _statements() if one[2]])
@pytest.mark.parametrize(
    ("settings", "size", "says"),
    [
        ({"bytes": 5 * GIB, "margin_bytes": GIB}, 5 * GIB, " 5.00 margin_bytes kv_cache"),
        ({"sequences": 3}, None, " sequences kv_cache"),
    ],
)
def test_what_a_worker_is_built_on_is_missing(monkeypatch, tmp_path, caplog, file, module, name, settings, size, says):
    found = _hidden(monkeypatch, file, module, name)
    monkeypatch.setattr("vllm.platforms.current_platform", Platform())
    monkeypatch.setenv("SPARKD_KV", json.dumps({**settings, "report": str(tmp_path / "report")}))
    found.__bases__ = (*found.__bases__, Extension)  # as vLLM does with --worker-extension-cls
    config = _config()
    made = found(vllm_config=config, rank=2)
    assert isinstance(made, Own) and isinstance(made, Extension)
    assert (made.extended(), made.cache.kv_cache_memory_bytes) == (42, size)
    assert config.parallel_config.worker_cls == "workers.kv.SparkWorker", "the engine's own configuration is as it was"
    assert name in caplog.text and module in caplog.text and facts(caplog.text).endswith(f"gpu_memory_utilization{says}")
    told = json.loads((tmp_path / "report.tp2").read_text())
    assert (told["phase"], told["rank"]) == ("stock", 2)
    assert name in told["why"]


def test_a_platform_without_a_worker_is_said_with_the_cure(monkeypatch):
    file, module, name = next(one for one in _statements() if one[2])
    found = _hidden(monkeypatch, file, module, name)
    platform = Platform()
    platform.name = "NotThere"
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    with pytest.raises(RuntimeError, match=rf"{name}.*NotThere.*--worker-cls.*kv_cache: \{{utilization: 0\.8\}}"):
        found(vllm_config=_config(), rank=0)


def test_only_what_a_worker_is_built_on_is_imported_by_a_statement():
    others = [one for one in _statements() if one[0] not in BUILT_ON and one[2]]
    assert others == [], "ask for it by symbols.imported, which names it where it is missing"
    assert {one[0] for one in _statements() if one[2]} == set(BUILT_ON)


def _machine(ask: Any) -> Machine:
    class Asking(Machine):
        def rehearse(self, scale: float) -> Demand:
            ask()
            return super().rehearse(scale)

    return Asking(40 * GIB)


@pytest.mark.parametrize(("module", "name"), sorted(set(_asked("imported"))))
def test_what_is_asked_for_in_a_rehearsal_is_missing(monkeypatch, caplog, module, name):
    imported(module, name)  # this release has it
    if name in vars(holder := importlib.import_module(module)):
        monkeypatch.delattr(holder, name)
    else:
        monkeypatch.delattr(holder, "__getattr__")  # it is made when it is asked for
    size = Sizing(_machine(lambda: imported(module, name)), CacheSettings(), lambda: NEED, dict).determine(lambda _limit: STOCK)
    assert size == STOCK
    assert f"{module}.{name}" in facts(caplog.text)
    caplog.clear()
    monkeypatch.setitem(sys.modules, module, None)  # the whole module is gone
    size = Sizing(_machine(lambda: imported(module, name)), CacheSettings(), lambda: NEED, dict).determine(lambda _limit: STOCK)
    assert size == STOCK
    assert f"{module}.{name}" in facts(caplog.text)


@pytest.mark.parametrize("name", sorted({one[0] for one in _asked("function")}))
def test_a_function_that_counts_is_missing(monkeypatch, name):
    symbols.function(name)
    for module in symbols._MODULES:
        if importlib.util.find_spec(module) is not None:
            monkeypatch.delattr(importlib.import_module(module), name, raising=False)
    with pytest.raises(Missing, match=name):
        symbols.function(name)


@pytest.mark.parametrize("name", sorted({one[-1] for one in _asked("method") if one}))
def test_a_method_is_missing(name):
    with pytest.raises(Missing, match=f"SimpleNamespace.{name}"):
        symbols.method(SimpleNamespace(), name)


@pytest.mark.parametrize("lacks", ["_init_minimal_kv_cache_for_profiling", "_cleanup_profiling_kv_cache"])
def test_a_runner_that_lacks_a_method_for_a_small_cache_is_named(lacks):
    known = {"_init_minimal_kv_cache_for_profiling", "_cleanup_profiling_kv_cache"} - {lacks}
    runner = SimpleNamespace(**dict.fromkeys(known, print), compilation_config=None)
    with pytest.raises(Missing, match=lacks), rehearsal.minimal_cache(runner):
        pass
