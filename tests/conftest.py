"""What holds for every test: Ctrl-C is that of a terminal, libraries compute on one thread, files that share an engine share a worker.

`make test` runs what is not marked `rest`, `make test-all` everything, in one session over all cores (Makefile). Order is random
(pytest-randomly), but what takes long begins first. One worker runs all files that SHARED names together.
"""

from __future__ import annotations

import gc
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from tests.support.descriptors import descriptors_in
from tests.support.waiting import until

if TYPE_CHECKING:
    from sparkd.vllm.ask.answers import ModelAnswer, ModelQuestion
    from sparkd.vllm.ask.model import InquiryRuntime

TESTS = Path(__file__).parent
# In the order in which they begin: the longest first, so that no worker is left with one at the end. The swap is the last of those that
# share its daemon, for it leaves another model loaded.
LONGEST = (
    "e2e/", "e2e/test_swap.py", "web/test_page.py", "sparkd/cli/test_with_daemon.py", "sparkd/cluster/", "sparkd/daemon/", "test_lint.py",
    "sparkd/vllm/ask/", "workers/stream/", "security/", "workers/rank/", "workers/guard/",
)  # fmt: skip
# By what their tests share: a daemon with real vLLM, a daemon with stub engines, one child's answers (`vllm_answers`), an import of vLLM.
SHARED = {
    "served": (
        "e2e/test_serving.py", "e2e/test_swap.py", "e2e/test_tools.py", "e2e/test_metrics_page.py",
        "e2e/test_serving_page.py",
    ),
    "stage": (
        "sparkd/daemon/test_daemon.py", "sparkd/daemon/test_recorded_requests.py",
        "sparkd/daemon/test_benches.py", "sparkd/daemon/test_load_bench.py", "sparkd/daemon/test_quality_bench.py",
    ),
    "answers": (
        "sparkd/vllm/ask/test_rare_configs.py", "workers/vllm/ask/test_model_answer.py",
    ),
    "vllm": (
        "workers/vllm/", "workers/load/test_gpt_oss.py", "workers/load/test_published.py", "workers/cache/test_partial.py",
        "sparkd/capacity/test_against_vllm.py", "sparkd/vllm/test_arg_check.py", "security/test_media.py",
    ),
}  # fmt: skip
# A shell that starts the tests in the background has Ctrl-C ignored (POSIX sh, 2.11), and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Processes that each have a thread for every core spend most of their time on waiting for one another's.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The same examples in every run: what `make test` says of a tree is the same twice. `make test-all` searches anew.
settings.register_profile("same", derandomize=True, database=None, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile("same")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _place(item.path))


def _place(path: Path) -> int:
    name = path.relative_to(TESTS).as_posix()
    return max((place for place, start in enumerate(LONGEST) if name.startswith(start)), default=len(LONGEST))


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Tests are collected and no garbage is: that would take a fifth of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    _settle()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test leaves open must not depend on when garbage is collected."""
    gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Whatever opened a file in the test's own folder closes it; a thread may need a moment. A failed test keeps what its traceback holds.

    A file imports vLLM in one of its tests, and the files after it would pay for that at every collection.
    """
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    try:
        yield
        if folder is not None and not hasattr(sys, "last_value"):
            with suppress(AssertionError):
                until(lambda: descriptors_in(folder) == [])
            assert descriptors_in(folder) == []
    finally:
        gc.enable()
        if nextitem is not None and nextitem.path != item.path:
            _settle()


def _settle() -> None:
    """Whatever collects garbage during a test, some before and after each, need not look through vLLM and thousands of tests."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Libraries complain of what is left at the end."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How to run each test again that failed."""
    names = dict.fromkeys(report.nodeid for kind in ("failed", "error") for report in terminalreporter.getreports(kind))
    if names and not hasattr(config, "workerinput"):
        seed = config.getoption("randomly_seed", None)
        terminalreporter.section("to run one of them again", "-")
        for name in names:
            terminalreporter.write_line(shlex.join([".venv/bin/python", "-m", "pytest", f"--randomly-seed={seed}", name]))


class Scheduling(LoadFileScheduling):
    """One worker runs a file, and so do all files that SHARED names together."""

    def _split_scope(self, nodeid: str) -> str:
        path = str(super()._split_scope(nodeid))
        name = path.removeprefix("tests/")
        return next((shared for shared, starts in SHARED.items() if name.startswith(starts)), path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than cores, because many tests wait for processes. Beside other work that would get too little of the cores."""
    others = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1
    cores = len(os.sched_getaffinity(0))
    return cores + (1 if others < cores else 3)


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
    """What the installed vLLM says of the models of every file that has `questions(folder)`; one child answers them all."""
    from sparkd.vllm.ask.model import InquiryRuntime, ask

    modules = dict.fromkeys(item.module for item in request.session.items if isinstance(item, pytest.Function))
    questions = {module.__name__: module.questions(tmp_path_factory.mktemp("models")) for module in modules if hasattr(module, "questions")}
    runtime = InquiryRuntime(None, [tmp_path_factory.mktemp("answers")])
    answers = iter(ask([question for asked in questions.values() for question in asked.values()], runtime))
    return VllmAnswers(questions, {name: {key: next(answers) for key in asked} for name, asked in questions.items()}, runtime)
