"""Asking the vLLM of another node: what goes there, what of its answers is taken, and that nothing is left running there."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sparkd.capacity.requirement import evidence_of
from sparkd.config.config import load_config
from sparkd.entry.node_runtime import NodeRuntime, runtime_in_sight, runtimes_in_sight
from sparkd.errors import AgentLost, ClusterError, EngineError, RankError
from sparkd.inquiry import other_node
from sparkd.inquiry.answer_schema import checked
from sparkd.inquiry.model_answers import Away, InquiryRuntime, ModelAnswer, ModelQuestion, ask, places
from sparkd.inquiry.other_node import NodeInquiry
from tests.sparkd.inquiry.test_model_answers import REFUSAL, STAGE, Engine, answer, one
from tests.support.checkpoints import dense, write
from tests.support.kept_answer import kept
from tests.support.published_tensors import tensors_of
from tests.support.waiting import until
from workers.agent import inquiry
from workers.agent.inquiry import Inquiries

THERE = "10.0.0.2"


class Agents:
    """The other node's agent, of which only questions are asked. tamper: what becomes of its lines."""

    def __init__(self, tamper: Callable[[str], Any] = lambda line: line) -> None:
        self.inquiries = Inquiries()
        self.tamper = tamper
        self.lost = False
        self.sent: list[str] = []
        self.ended: list[str] = []

    async def ask(self, node_ip: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        assert node_ip == THERE
        if method == "inquire":
            self.sent.append(arguments[1])
            return self.inquiries.start(*arguments)
        if method == "end_inquiry":
            self.ended.append(arguments[0])
            return self.inquiries.end(*arguments)
        if self.lost:
            raise AgentLost(f"The agent of node {THERE} did not answer.")
        state = self.inquiries.read(*arguments)
        return {**state, "lines": [self.tamper(line) for line in state["lines"]]}


def exists(path: str) -> bool:
    return os.path.exists(path)


def wait(done: Callable[[], bool]) -> None:
    until(done, "it", 0.01)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(other_node, "POLL_S", 0.01)
    return Engine(tmp_path)


async def asked(
    engine: Engine, agents: Agents, questions: Sequence[ModelQuestion], vllm: str = "0.32.0", cancel: threading.Event | None = None
) -> tuple[InquiryRuntime, list[ModelAnswer | None]]:
    conversation = NodeInquiry(agents, THERE, str(engine.python), asyncio.get_running_loop())
    runtime = InquiryRuntime(engine.interpreter, engine.folders, Away(THERE, vllm, "p", conversation))
    return runtime, await asyncio.to_thread(ask, questions, runtime, cancel=cancel)


async def test_an_answer_of_another_node_is_kept_for_its_release_and_packages(engine: Engine) -> None:
    engine.says(own=[{"question": 0, "answer": answer()}])
    runtime, (found,) = await asked(engine, Agents(), [one()])
    assert found is not None and found == kept(one(), runtime) and found.stages[0].layers[0].token_bytes == 4096.0
    read = [Away(THERE, "0.32.0", "p"), Away("10.0.0.3", "0.32.0", "p"), Away(THERE, "0.33.0", "p"), Away(THERE, "0.32.0", "q")]
    assert [kept(one(), InquiryRuntime(engine.interpreter, engine.folders, away)) is None for away in read] == [False, False, True, True]
    assert kept(one(), engine) is None, "this node's own vLLM was not asked"


async def test_a_load_counts_by_the_answer_for_the_release_that_will_run_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(engine.root / "cache"))
    engine.says(own=[{"question": 0, "answer": answer()}])
    file = engine.root / "sparkd.yaml"
    entry = {"model": "o/n", "runtime": str(engine.root / "elsewhere/bin/python")}
    file.write_text(json.dumps({"state_dir": str(engine.root), "models": {"m": entry}}))
    config = load_config(file, environ={})
    conversation = NodeInquiry(Agents(), THERE, str(engine.python), asyncio.get_running_loop())
    runtime = InquiryRuntime(config.models["m"].runtime_of(config.engine), places(engine.root), Away(THERE, "0.32.0", "p", conversation))
    (found,) = await asyncio.to_thread(ask, [one()], runtime)
    facts = {"platform": "cpu", "entrypoint": "e", "vllm": "0.32.0", "packages": "p"}
    for more, known in (({}, [found]), ({"vllm": "0.33.0"}, [None]), ({"packages": "q"}, [None])):
        assert list(evidence_of(config.models["m"], config, facts | more).ask([one()])) == known


async def test_the_question_goes_as_data_and_no_code_with_it(engine: Engine, tmp_path: Path) -> None:
    shape = dense()
    folder = write(tmp_path / "m", shape, tensors_of(shape))
    (folder / "modeling_own.py").write_text("raise SystemExit")
    engine.says(own=[{"question": 0, "answer": answer()}])
    agents = Agents()
    _, (found,) = await asked(engine, agents, [ModelQuestion(folder=folder, args=("--api-key", "sk-1234"))])
    (sent,), (there,) = agents.sent, engine.asked()
    assert found is not None and str(folder) not in sent and "SystemExit" not in sent and "sk-1234" not in sent
    assert json.loads(sent)["questions"][0]["folder"] is None
    assert {"config.json"} <= there["files"].keys() and not [name for name in there["files"] if name.endswith(".py")]
    weights = [name for name in there["files"] if name.endswith(".safetensors")]
    assert weights == [path.name for path in folder.glob("*.safetensors")]
    assert not exists(there["questions"][0]["folder"]), "its files are gone with the question"


async def test_a_draft_in_a_folder_of_this_node_goes_with_the_question(engine: Engine, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text('{"model_type": "eagle"}')
    engine.says(own=[{"question": 0, "answer": answer()}])
    args = ("--speculative-config", json.dumps({"method": "eagle", "model": str(draft), "num_speculative_tokens": 2}))
    runtime, _ = await asked(engine, Agents(), [one(args=args)])
    (there,) = engine.asked()
    assert there["drafts"] == {"config.json": '{"model_type": "eagle"}'} and str(draft) not in json.dumps(there["questions"])
    assert kept(one(args=args), runtime) is not None


def test_a_name_that_leads_out_of_the_folder_is_not_written(engine: Engine, tmp_path: Path) -> None:
    engine.says(own=[{"question": 0, "answer": answer()}])
    out = str(tmp_path / "out")
    question = {"folder": "/etc", "files": {out: "x", "../out": "x", "config.json": "{}"}, "headers": {f"{out}.safetensors": {}}}
    inquiries = Inquiries()
    name = inquiries.start(str(engine.python), json.dumps({"platform": "own", "questions": [question]}))
    wait(lambda: not inquiries.read(name, 0)["running"])
    (there,) = engine.asked()
    assert set(there["files"]) == {"config.json"} and there["questions"][0]["folder"] != "/etc" and not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    "damaged",
    [
        [],
        {name: value for name, value in answer().items() if name != "stages"},
        answer(stages=[{**STAGE, "parameter_bytes": -1}]),
        answer(refusal={**REFUSAL, "step": "revenge"}),
    ],
)
async def test_an_answer_that_is_none_is_not_taken(engine: Engine, damaged: Any) -> None:
    engine.says(own=[{"question": 0, "answer": answer()}])
    agents = Agents(lambda line: json.dumps({"question": 0, "answer": damaged}) if '"answer"' in line else line)
    with pytest.raises(EngineError, match=THERE):
        await asked(engine, agents, [one()])
    assert not list(engine.root.glob("kept/*")) and len(agents.ended) == 1


async def test_a_line_that_nobody_can_read_ends_the_conversation(engine: Engine) -> None:
    engine.says(own=[{"question": 0, "answer": answer()}])
    with pytest.raises(EngineError, match=THERE):
        await asked(engine, Agents(lambda _: "{"), [one()])


def test_the_answers_of_the_program_have_that_shape() -> None:
    for whole in (answer(), answer(refusal=REFUSAL, stages=[], cache=None), answer(tasks=["generate"], draft=None, hybrid=False)):
        assert checked(json.dumps(whole), THERE) == whole


async def test_a_question_that_is_given_up_leaves_nothing_running_there(engine: Engine) -> None:
    engine.says(own=[{"progress": "asking", "question": 0}, "wait"])
    cancel, agents = threading.Event(), Agents()
    asking = asyncio.create_task(asked(engine, agents, [one()], cancel=cancel))
    pid = engine.root / "pid"
    await asyncio.to_thread(wait, lambda: bool(exists(str(pid)) and pid.read_text()))
    cancel.set()
    assert (await asking)[1] == [None]
    await asyncio.to_thread(wait, lambda: not exists(f"/proc/{pid.read_text()}"))


async def test_an_agent_that_is_gone_is_an_error_of_the_cluster(engine: Engine) -> None:
    engine.says(own=[{"progress": "asking", "question": 0}, "wait"])
    agents = Agents()
    agents.lost = True
    with pytest.raises(ClusterError, match=THERE):
        await asked(engine, agents, [one()])
    assert len(agents.ended) == 1


def test_a_conversation_that_nobody_reads_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiry, "UNREAD_S", 0.2)
    monkeypatch.setattr(inquiry, "LOOK_S", 0.01)
    engine.says(own=["wait"])
    inquiries = Inquiries()
    request = json.dumps({"platform": "own", "questions": []})
    first = inquiries.start(str(engine.python), request)
    thread = inquiries._inquiries.find(first).thread
    wait(lambda: not thread.is_alive())
    assert not inquiries.read(first, 0)["running"]
    second = inquiries.start(str(engine.python), request)
    with pytest.raises(RankError):
        inquiries.read(first, 0)
    inquiries.end(second)


def test_a_python_that_is_not_there_says_so(tmp_path: Path) -> None:
    inquiries = Inquiries()
    name = inquiries.start(str(tmp_path / "python"), json.dumps({"platform": "own", "questions": []}))
    wait(lambda: not inquiries.read(name, 0)["running"])
    (line,) = inquiries.read(name, 0)["lines"]
    assert "failed" in json.loads(line)


FACTS = {"platform": "cpu", "vllm": "0.32.0", "entrypoint": "workers.stub", "packages": "p"}
NONE = {"platform": "cpu", "vllm": None, "entrypoint": None, "packages": "n"}
MISSING = RankError("The runtime /x cannot be run.")


@pytest.mark.parametrize(
    ("nodes", "node", "only"),
    [
        ([FACTS, FACTS], "0", None),
        ([MISSING, AgentLost("silent"), FACTS], "2", {"2"}),
        ([MISSING, FACTS, NONE, FACTS | {"packages": "q"}], "1", {"1", "3"}),
        ([NONE, NONE], "0", None),
    ],
)
async def test_another_nodes_runtime_counts_where_this_one_has_none(nodes: list[Any], node: str, only: set[str] | None) -> None:
    async def ask_one(name: str) -> Any:
        if isinstance(nodes[int(name)], Exception):
            raise nodes[int(name)]
        return nodes[int(name)]

    found = await runtime_in_sight([str(number) for number in range(len(nodes))], ask_one, vllm=True)
    assert found == NodeRuntime(nodes[int(node)], node, None if only is None else frozenset(only))


async def test_each_release_is_named_once() -> None:
    newer = FACTS | {"vllm": "0.33.0"}
    nodes = {"a": FACTS, "b": NONE, "c": newer, "d": FACTS, "e": newer}

    async def ask_one(name: str) -> Any:
        return nodes[name]

    found = await runtimes_in_sight(list(nodes), ask_one, vllm=True)
    assert found == [NodeRuntime(FACTS, "a"), NodeRuntime(newer, "c", frozenset({"c", "e"}))]
