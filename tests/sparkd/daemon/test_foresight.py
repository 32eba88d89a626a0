"""When the daemon asks vLLM about its models, and what."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkd.config.config import Config, load_config, parse_model
from sparkd.daemon import foresight
from sparkd.daemon.foresight import AGAIN_S, NO_ROOM_S, QUIET_S, Foresight, answers_about
from sparkd.entry.node_runtime import NodeRuntime
from sparkd.errors import AgentLost, EngineError
from sparkd.inquiry.model_answers import InquiryRuntime, ModelAnswer, ModelQuestion
from sparkd.state.nouns import ModelState
from sparkd.state.snapshot import Snapshot
from tests.support.checkpoints import dense, write
from tests.support.published_tensors import tensors_of
from tests.support.waiting import HUNG_S
from workers.host.runtime import API_SERVER

HERE, THERE = "10.0.0.1", "10.0.0.2"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    shape = dense()
    folder = write(tmp_path / "m", shape, tensors_of(shape))
    models: dict[str, Any] = {"a": {}, "b": {"quantize": "fp8", "tensor_parallel": 2}, "stub": {"entrypoint": "workers.stub"}}
    file = tmp_path / "sparkd.yaml"
    entries = {name: {"model": str(folder), **keys} for name, keys in models.items()}
    file.write_text(json.dumps({"state_dir": str(tmp_path / "s"), "models": entries}))
    return load_config(file, environ={})


def snapshot(*states: ModelState, **fields: Any) -> Snapshot:
    models = {str(number): SimpleNamespace(state=state) for number, state in enumerate(states)}
    free = {HERE: fields.pop("free", 64 << 30), THERE: fields.pop("free_there", 64 << 30)}
    nodes = tuple(SimpleNamespace(node_id=node, reading=SimpleNamespace(mem_available_bytes=size)) for node, size in free.items())
    return replace(Snapshot(0.0, True, False, 0.0, models, nodes, {}), **fields)  # type: ignore[arg-type]


class Nodes:
    """Two, of which those of `able` have vLLM. asked: the methods of agents that were called, with their nodes."""

    def __init__(self, able: str) -> None:
        self.able = able
        self.asked: list[tuple[str, str]] = []

    async def runtimes(self, interpreter: str) -> list[NodeRuntime]:
        facts = {"platform": "cpu", "vllm": "0.32.0", "entrypoint": API_SERVER, "packages": "p"}
        here, there = NodeRuntime(facts, HERE), NodeRuntime(facts, THERE, frozenset({THERE}))
        return [one for one in (here, there) if one.node in self.able]

    async def ask(self, node_ip: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        self.asked.append((node_ip, method))
        raise AgentLost(f"The agent of node {node_ip} did not answer.")


class Over(Exception):
    """The clock has run down."""


class Clock:
    """Seconds pass only while the foresight rests, until there are none left."""

    def __init__(self, seconds: float) -> None:
        self.now_s = 0.0
        self._end_s = seconds

    def __call__(self) -> float:
        return self.now_s

    async def rest(self, seconds: float) -> None:
        self.now_s += seconds
        if self.now_s > self._end_s:
            raise Over


async def looked(
    config: Config,
    now: Snapshot,
    monkeypatch: pytest.MonkeyPatch,
    answer: Exception | Sequence[ModelAnswer | None],
    then: Snapshot | None = None,
    able: str = HERE,
    seconds: float = QUIET_S + NO_ROOM_S - 1,
) -> list[str]:
    """The names of the models that it asked about within so many seconds. then: the snapshot while it asks. able: the nodes that have vLLM,
    each of its own release."""
    names: list[str] = []
    shown = [now]
    cancelled: list[bool] = []

    def ask(
        spec: Any, _config: Config, runtime: InquiryRuntime, _platform: str, _nodes: int, cancel: threading.Event
    ) -> Sequence[ModelAnswer | None]:
        names.append(spec.name)
        assert (runtime.away.node if runtime.away is not None else HERE) in able
        if then is not None:
            shown[0] = then
            cancelled.append(cancel.wait(HUNG_S))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(foresight, "answers_about", ask)
    monkeypatch.setattr(foresight, "YIELD_S", 0.01)
    clock = Clock(seconds)
    with pytest.raises(Over):
        await Foresight(lambda: config, lambda: shown[0], Nodes(able), rest=clock.rest, clock=clock).run()
    return [*names, *("cancelled" for each in cancelled if each)]


GIVEN = [None]


@pytest.mark.parametrize("answer", [GIVEN, [], EngineError("no")])
def test_each_model_is_asked_about_once_in_a_quiet_moment(config: Config, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    assert asyncio.run(looked(config, snapshot(ModelState.READY, ModelState.STOPPED), monkeypatch, answer)) == ["a", "b"]


def test_each_is_asked_about_again_after_a_while(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, times in ((QUIET_S - 1, 0), (QUIET_S + AGAIN_S - 1, 1), (QUIET_S + 2 * AGAIN_S - 1, 2)):
        names = asyncio.run(looked(config, snapshot(ModelState.READY), monkeypatch, GIVEN, seconds=seconds))
        assert names.count("a") == times


@pytest.mark.parametrize(
    "now",
    [
        snapshot(ModelState.LOADING),
        snapshot(ModelState.READY, ModelState.DRAINING),
        snapshot(settled=False),
        snapshot(draining=True),
        snapshot(free=1 << 30),
        snapshot(nodes=()),
    ],
)
def test_nothing_is_asked_while_a_model_starts_or_ends_or_memory_is_short(
    config: Config, monkeypatch: pytest.MonkeyPatch, now: Snapshot
) -> None:
    assert asyncio.run(looked(config, now, monkeypatch, GIVEN)) == []


def test_a_question_gives_way_to_a_load(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    now, then = snapshot(ModelState.READY), snapshot(ModelState.LOADING)
    assert asyncio.run(looked(config, now, monkeypatch, GIVEN, then)) == ["a", "cancelled"]


@pytest.mark.parametrize(("free", "names"), [({"free": 1 << 30}, ["a", "b"]), ({"free_there": 1 << 30}, [])])
def test_where_this_node_has_no_vllm_another_is_asked_that_has_room(
    config: Config, monkeypatch: pytest.MonkeyPatch, free: dict[str, int], names: list[str]
) -> None:
    now = snapshot(ModelState.READY, **free)
    assert asyncio.run(looked(config, now, monkeypatch, GIVEN, able=THERE)) == names


def test_the_release_of_each_node_is_asked(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asyncio.run(looked(config, snapshot(ModelState.READY), monkeypatch, GIVEN, able=HERE + THERE)) == ["a", "a", "b", "b"]


def test_a_node_without_room_keeps_no_other_from_being_asked(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    now = snapshot(ModelState.READY, free_there=1 << 30)
    assert asyncio.run(looked(config, now, monkeypatch, GIVEN, able=HERE + THERE)) == ["a", "b"]


async def test_an_agent_that_does_not_answer_is_asked_again_later(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, clock = Nodes(THERE), Clock(QUIET_S + NO_ROOM_S - 1)
    with pytest.raises(Over):
        await Foresight(lambda: config, lambda: snapshot(ModelState.READY), nodes, rest=clock.rest, clock=clock).run()
    assert nodes.asked == [(THERE, "inquire")] * 2


@pytest.mark.parametrize(("quantize", "times"), [("best", 1), ({"format": "best", "gib": 1}, 1), ("auto", 0), ("fp8", 0)])
def test_the_weights_of_an_entry_with_best_are_measured_once(
    config: Config, monkeypatch: pytest.MonkeyPatch, quantize: Any, times: int
) -> None:
    measured: list[str] = []

    def measure(checkpoint: str, identity: str, _python: Path, folder: Path, _free: int, **_: Any) -> None:
        measured.append(checkpoint)
        folder.mkdir(parents=True)
        (folder / f"{identity}.json").write_text(json.dumps({"errors": {"a": {"fp8": 0.1}}, "sensitivities": {}}))

    monkeypatch.setattr(foresight, "measure", measure)
    spec = config.models["a"]
    entry = parse_model("a", {"model": spec.model, "quantize": quantize}, over_admin=False)
    for _ in range(2):
        foresight.measure_mix(entry, config, InquiryRuntime(None, []), threading.Event())
    assert measured == [spec.model] * times


def test_an_entry_is_asked_about_in_its_own_format_and_split(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    questions: list[ModelQuestion] = []

    def ask(asked: Sequence[ModelQuestion], *_: Any, **__: Any) -> Sequence[None]:
        questions.extend(asked)
        return [None] * len(asked)

    monkeypatch.setattr(foresight, "ask", ask)
    answers_about(config.models["b"], config, InquiryRuntime(None, []), "cpu", 4, threading.Event())
    assert [(each.tensor_parallel, "spark_stream" in each.args) for each in questions] == [(2, False), (2, True)]
