"""What holds for every test: Ctrl-C is what it is in a terminal, and some have the machine to themselves.

A shell that starts the tests in the background has Ctrl-C ignored (POSIX sh, 2.11), and what they start would inherit that.

The tests run in three parts (Makefile). `alone`, one after another: tests that look at what the machine holds or how long something takes,
and those that share a daemon with them. `engines`, three files side by side: tests that start daemons, Ray or an engine and mostly wait for
them. The others side by side on all cores. A run of one part does not import the files of the others.
"""

from __future__ import annotations

import gc
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.support.observability import find_promtool

if TYPE_CHECKING:
    from sparkd.inquiry.model_answers import InquiryRuntime, ModelAnswer, ModelQuestion

TESTS = Path(__file__).parent
ALONE = (
    "e2e/test_quantize.py",
    "e2e/test_serving.py",
    "e2e/test_worst_load.py",
    "sparkd/gateway/test_limits.py",
    "workers/guard/test_guard.py",
    "sparkd/cluster/test_launcher_several_nodes.py",
)
# Each has `questions(folder)`; one child, which imports vLLM once, answers them all (`vllm_answers`).
MODELS = (
    "sparkd/inquiry/test_rare_configs.py",
    "sparkd/inquiry/test_known_architectures.py",
    "workers/engine/test_model_answer.py",
)
# They share one daemon with a model in real vLLM (`served` of tests/e2e/conftest.py), whose start takes a minute.
SERVED = ("e2e/test_serving_page.py", "e2e/test_tools.py", "e2e/test_metrics_page.py", "e2e/test_traces.py")
# In the order in which they start: what takes long goes first, so that no worker is left with it at the end.
ENGINES = (
    "sparkd/daemon/test_daemon.py",
    "web/test_page.py",
    "sparkd/cluster/test_launcher_vllm.py",
    "e2e/test_upgrade.py",
    "sparkd/cluster/test_two_nodes.py",
    *SERVED,
    "sparkd/cli/test_with_daemon.py",
    "security/test_engine_door.py",
    *MODELS,
    "sparkd/inquiry/test_known_formats.py",
    "sparkd/daemon/test_benches.py",
    "sparkd/daemon/test_load_bench.py",
    "sparkd/daemon/test_restart.py",
    "sparkd/daemon/test_faulty_daemon.py",
    "sparkd/gateway/test_memory.py",
    "security/test_descriptors.py",
    "sparkd/cluster/test_ray_head.py",
    "workers/agent/test_actor.py",
    "sparkd/cluster/test_reconcile.py",
    "security/test_ray_children.py",
    "sparkd/cluster/test_ray_connection.py",
    "sparkd/inquiry/test_other_node_vllm.py",
    "workers/stub/test_metrics.py",
    "e2e/test_kv.py",
    "bench/test_smallest.py",
)
# Each of its cases is a program by itself, so any worker may run any of them.
APART = "tests/bench/test_smallest.py::test_it_runs_at_its_smallest"
# Not run where promtool is missing; `make test` says so (deploy/promtool.sh).
PROMTOOL = ("test_alert_rules.py", "test_metrics_page.py")
# Not run where npm is missing; `make page` says so.
TYPESCRIPT = ("test_tsc.py",)
TSC = Path(__file__).parent / "web" / "node_modules" / ".bin" / "tsc"
# Not run where chromium is missing; `make test` says so (deploy/chromium.sh).
CHROMIUM = ("web/test_page.py", "e2e/test_serving_page.py")

signal.signal(signal.SIGINT, signal.default_int_handler)


# By what is asked for with -m.
PARTS = {"alone": "alone", "engines and not slow": "engines", "slow": "engines", "not alone and not engines": None}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Half a minute is spent on importing thousands of tests, and torch with them, for some hundreds of others."""
    if collection_path.name in PROMTOOL and find_promtool() is None:
        return True
    if collection_path.name in TYPESCRIPT and not TSC.exists():
        return True
    if collection_path.as_posix().endswith(CHROMIUM) and shutil.which("chromium") is None:
        return True
    asked = config.getoption("markexpr")
    return True if collection_path.name.startswith("test_") and asked in PARTS and _part(collection_path) != PARTS[asked] else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (part := _part(item.path)) is not None:
            item.add_marker(part)
    items.sort(key=lambda item: _start(item.path))


def pytest_collection_finish() -> None:
    _settle()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A file imports vLLM in one of its tests, and the files after it would pay for that at every collection."""
    if nextitem is not None and nextitem.path != item.path:
        _settle()


def _settle() -> None:
    """Whatever collects garbage during a test, some before and after each, need not look through vLLM and thousands of tests."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Libraries complain of what is left at the end."""
    gc.unfreeze()


class Scheduling(LoadFileScheduling):
    """A file is run by one worker, and so are all MODELS and all SERVED; the cases of APART by several."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(APART):
            return nodeid
        path = str(super()._split_scope(nodeid))
        name = path.removeprefix("tests/")
        return "models" if name in MODELS else "served" if name in SERVED else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@dataclass(frozen=True)
class VllmAnswers:
    """By the names of test modules, and of each by the keys that its questions have there. runtime: it keeps the answers."""

    questions: Mapping[str, Mapping[Any, ModelQuestion]]
    answers: Mapping[str, Mapping[Any, ModelAnswer | None]]
    runtime: InquiryRuntime


@pytest.fixture(scope="session")
def vllm_answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VllmAnswers:
    """What the installed vLLM says of the models of those MODELS that run."""
    from sparkd.inquiry.model_answers import InquiryRuntime, ask

    modules = dict.fromkeys(item.module for item in request.session.items if isinstance(item, pytest.Function))
    questions = {
        module.__name__: module.questions(tmp_path_factory.mktemp("models"))
        for module in modules
        if Path(module.__file__).relative_to(TESTS).as_posix() in MODELS
    }
    runtime = InquiryRuntime(None, [tmp_path_factory.mktemp("answers")])
    answers = iter(ask([question for asked in questions.values() for question in asked.values()], runtime))
    return VllmAnswers(questions, {name: {key: next(answers) for key in asked} for name, asked in questions.items()}, runtime)


def _part(path: Path) -> str | None:
    name = path.relative_to(TESTS).as_posix()
    return "alone" if name.startswith(ALONE) else "engines" if name in ENGINES else None


def _start(path: Path) -> int:
    name = path.relative_to(TESTS).as_posix()
    return ENGINES.index(name) if name in ENGINES else -1
