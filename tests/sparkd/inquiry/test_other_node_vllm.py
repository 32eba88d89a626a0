"""A node without vLLM and another that has it: the real vLLM there answers, and plans and loads of this node count by its answer."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkd.capacity import plan_for_node
from sparkd.capacity.requirement import requirement_of
from sparkd.config.config import Config, load_config
from sparkd.daemon.foresight import Foresight
from sparkd.entry.node_runtime import NodeRuntime, runtimes_in_sight
from sparkd.errors import RankError
from sparkd.state.nouns import ModelState
from sparkd.state.snapshot import Snapshot
from sparkd.vllm.installed import full_version_in
from tests.support.checkpoints import dense, tensors_of, write
from tests.support.daemon_process import ROOT
from workers.host.runtime import probe

HERE, THERE = "10.0.0.1", "10.0.0.2"
AGENT = """
import json, sys
from workers.agent.inquiry import Inquiries
from workers.host.runtime import probe
inquiries = Inquiries()
methods = {"inquire": inquiries.start, "inquiry": inquiries.read, "end_inquiry": inquiries.end}
methods["runtime"] = lambda path: probe(path).to_dict()
for line in sys.stdin:
    method, arguments = json.loads(line)
    print(json.dumps(methods[method](*arguments)), flush=True)
"""


class Nodes:
    """This node, and an agent's process whose mounts are its own: the runtime is there and not here."""

    def __init__(self, python: Path) -> None:
        python.parent.parent.mkdir()
        mount = f'mount --bind "{sys.prefix}" "{python.parent.parent}" && exec "$0" "$@"'
        self._agent = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", mount, sys.executable, "-c", AGENT],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True,
        )  # fmt: skip
        self._talking = asyncio.Lock()
        self.methods: list[str] = []

    async def ask(self, node_ip: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        if node_ip == HERE:
            return await asyncio.to_thread(lambda: probe(*arguments).to_dict())
        self.methods.append(method)
        async with self._talking:
            return json.loads(await asyncio.to_thread(self._say, json.dumps([method, arguments])))

    def _say(self, line: str) -> str:
        assert self._agent.stdin is not None and self._agent.stdout is not None
        self._agent.stdin.write(line + "\n")
        self._agent.stdin.flush()
        return self._agent.stdout.readline()

    async def runtime(self, interpreter: str) -> NodeRuntime:
        (found,) = await self.runtimes(interpreter)
        return found

    async def runtimes(self, interpreter: str) -> list[NodeRuntime]:
        return await runtimes_in_sight([HERE, THERE], lambda node: self.ask(node, "runtime", interpreter, timeout_s=60), vllm=True)

    def end(self) -> None:
        with self._agent:
            self._agent.kill()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shape = dense(architectures=["LlamaForCausalLM"])
    folder = write(tmp_path / "m", shape, tensors_of(shape))
    entry = {"model": str(folder), "runtime": str(tmp_path / "runtime/bin/python"), "max_model_len": 1024, "tensor_parallel": 1}
    file = tmp_path / "sparkd.yaml"
    (tmp_path / "state").mkdir()
    file.write_text(json.dumps({"state_dir": str(tmp_path / "state"), "models": {"m": entry}}))
    return load_config(file, environ={})


@pytest.fixture
def nodes(config: Config) -> Iterator[Nodes]:
    runtime = config.models["m"].runtime
    assert runtime is not None
    made = Nodes(Path(runtime))
    yield made
    made.end()


@pytest.mark.rest
async def test_the_vllm_of_another_node_answers_for_this_one(nodes: Nodes, config: Config) -> None:
    spec = config.models["m"]
    assert spec.runtime is not None and full_version_in(Path(spec.runtime)) is None
    with pytest.raises(RankError):
        probe(str(spec.runtime))

    async def unlinked(*, rdma: bool) -> Mapping[int, str]:
        return {}

    async def sureness() -> str:
        question = plan_for_node.QuestionHere(model="m")
        found = await plan_for_node.planned_here(question, config.lookup, unlinked, config, elsewhere=nodes.runtime)
        return str(found["options"][0]["footprint"]["sureness"])

    assert await sureness() != "exact"
    runtime = await nodes.runtime(str(spec.runtime))
    before = requirement_of(spec, config, runtime, 8.0, 8.0)

    readings = [SimpleNamespace(node_id=node, reading=SimpleNamespace(mem_available_bytes=64 << 30)) for node in (HERE, THERE)]
    resting = {"m": SimpleNamespace(state=ModelState.STOPPED)}
    snapshot = replace(Snapshot(0.0, True, False, 0.0, {}, (), {}), models=resting, nodes=tuple(readings))  # type: ignore[arg-type]

    class Answered(Exception):
        pass

    async def rest(_seconds: float) -> None:
        if "end_inquiry" in nodes.methods:
            raise Answered
        await asyncio.sleep(0)

    with pytest.raises(Answered):
        await Foresight(lambda: config, lambda: snapshot, nodes, rest=rest).run()

    assert await sureness() == "exact"
    after = requirement_of(spec, config, runtime, 8.0, 8.0)
    assert after.vllm == before.vllm == full_version_in(None)
    assert before.account is not None and after.account is not None
