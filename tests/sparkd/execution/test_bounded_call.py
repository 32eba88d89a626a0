"""A call in a process of its own: what comes back of it, and that one which hangs for good gives its place back. Plans are made so."""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkd.capacity import plan_for_node
from sparkd.capacity.planned_entry import PlanRequest
from sparkd.config.config import Config, load_config
from sparkd.errors import SparkdError, Unavailable
from sparkd.execution import bounded_call
from sparkd.execution.bounded_call import NoAnswer, call
from sparkd.execution.threads import Threads
from tests.support.bounded_functions import ERRORS, fail, sleep, take, with_descendant
from tests.support.checkpoints import write_folder
from tests.support.fakes import FakeCluster
from tests.support.processes import alive
from tests.support.waiting import HUNG_S, until

TINY = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 64}
SHARDS = {"model.safetensors": {"model.embed_tokens.weight": ("BF16", (64, 64))}}
# Nothing but SIGKILL ends it.
HANGS = "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); time.sleep(600)"
PROCESS = subprocess.Popen


@pytest.fixture(autouse=True)
def _a_start_takes_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_call, "START_S", HUNG_S)


def test_a_value_comes_back() -> None:
    assert call(json.loads, '{"a": [1, null]}', time_s=HUNG_S) == {"a": [1, None]}


@pytest.mark.parametrize("number", range(len(ERRORS)), ids=lambda number: type(ERRORS[number]).__name__)
def test_an_error_of_sparkd_s_comes_back_as_it_was_raised(number: int) -> None:
    with pytest.raises(SparkdError) as caught:
        call(fail, number, time_s=HUNG_S)

    expected = ERRORS[number]
    assert (type(caught.value), str(caught.value), vars(caught.value)) == (type(expected), str(expected), vars(expected))
    assert (caught.value.headers(), caught.value.extra()) == (expected.headers(), expected.extra())


def test_a_call_that_takes_too_long_is_ended_by_its_own_clock() -> None:
    with pytest.raises(NoAnswer) as caught:
        call(sleep, time_s=0.01)

    assert caught.value.exceeded == "0.01 s"


def test_a_call_that_takes_too_much_memory_is_ended() -> None:
    with pytest.raises(NoAnswer, match=f"more than {bounded_call.MEMORY_BYTES >> 20} MiB of memory"):
        call(take, bounded_call.MEMORY_BYTES, time_s=HUNG_S)


@pytest.mark.parametrize("number", [0, signal.SIGALRM])
def test_what_a_call_has_started_ends_with_it(number: int, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    result: object
    try:
        result = call(with_descendant, str(path), number, time_s=HUNG_S)
    except NoAnswer as error:
        result = error.exceeded

    until(lambda: not alive(int(path.read_text())), "the end of what the call started")
    assert result == {0: "answer", signal.SIGALRM: f"{HUNG_S:g} s"}[number]


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Every process that is started from now on, which neither begins nor ends."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: Any, **named: Any) -> subprocess.Popen[bytes]:
        started.append(PROCESS(*arguments, **named))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(bounded_call, "module_command", lambda *_: [sys.executable, "-c", HANGS])
    monkeypatch.setattr(bounded_call, "START_S", 0.1 - plan_for_node.LIMIT_S)
    return started


def test_a_process_that_hangs_is_killed(hanging: list[subprocess.Popen[bytes]]) -> None:
    with pytest.raises(NoAnswer) as caught:
        call(sleep, time_s=plan_for_node.LIMIT_S)

    assert caught.value.exceeded is None
    assert [process.poll() for process in hanging] == [-signal.SIGKILL]


def test_a_process_that_the_kernel_cannot_end_is_let_go(hanging: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for a file server which is gone."""
    with monkeypatch.context() as patch:
        patch.setattr(bounded_call, "KILLED_S", 0.01)
        patch.setattr("os.killpg", lambda *_: None)
        with pytest.raises(NoAnswer):
            call(sleep, time_s=plan_for_node.LIMIT_S)
    (process,) = hanging
    assert process.poll() is None
    process.kill()
    process.wait()


async def test_a_plan_that_hangs_gives_its_place_back(
    hanging: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plan_for_node, "_PLANS", Threads("plan", 1, 1))
    question = PlanRequest(model=str(write_folder(tmp_path / "tiny", SHARDS, TINY)), hardware="spark", max_model_len=64)
    order = await plan_for_node.order_here(question, None, FakeCluster().unlinked, Config())
    for _ in range(2):
        with pytest.raises(Unavailable, match="no answer"):
            await plan_for_node.planned_here(order)
    assert [process.poll() for process in hanging] == [-signal.SIGKILL] * 2
    monkeypatch.undo()

    plan = await plan_for_node.planned_here(order)

    assert plan["choice"]["config"]["max_model_len"] == 64


async def test_the_process_of_a_plan_gets_no_key_and_no_other_model_s_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    monkeypatch.setattr(plan_for_node, "call", lambda *arguments, time_s: sent.append(pickle.dumps(arguments)) or {})
    file = tmp_path / "sparkd.yaml"
    models = {name: {"model": str(tmp_path), "env": {"HF_TOKEN": f"hf_of_{name}"}} for name in ("mine", "other")}
    keys = {"admin": "an-admin-key-of-many-letters", "inference": "an-inference-key-of-many-letters"}
    file.write_text(json.dumps({"state_dir": str(tmp_path / "state"), "models": models, "keys": keys}))
    config = load_config(file, environ={})

    order = await plan_for_node.order_here(PlanRequest(model="mine"), config.lookup("mine"), FakeCluster().unlinked, config)
    await plan_for_node.planned_here(order)

    (text,) = sent
    present = {secret: secret.encode() in text for secret in ("hf_of_mine", "hf_of_other", *keys.values())}
    assert present == {"hf_of_mine": True, "hf_of_other": False} | dict.fromkeys(keys.values(), False)
