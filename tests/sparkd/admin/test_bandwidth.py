"""Measurements between nodes: as the daemon runs them over agents that answer as told, what a rate says, and the program's own life."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from sparkd.admin import bandwidth
from sparkd.admin.app import admin_app
from sparkd.admin.bandwidth import MOST_BYTES, Bandwidth
from sparkd.admin.jobs import Jobs
from sparkd.config.config import load_config
from sparkd.control.journal import Journal
from sparkd.errors import AgentLost, BadRequest, Conflict, RankError
from sparkd.execution.boundary import Boundary
from sparkd.fabric.checks import FAIL, OK, WARN
from sparkd.fabric.fabric_nodes import FabricNodes
from sparkd.fabric.rates import Rate, RateBook, finding
from sparkd.fabric.report import report
from sparkd.gateway.routes import ADMIN_ROOT
from sparkd.metrics import FABRIC_NORMAL_RATE, FABRIC_RATE
from sparkd.state.nouns import Operation, OperationState
from sparkd.state.store import Store
from tests.sparkd.control.test_supervisor import make_ready
from tests.support.admin_parts import parts_of
from tests.support.fabric_tree import readings
from tests.support.facts import lacking
from tests.support.fakes import Scene as Supervised
from tests.support.fakes import stage
from tests.support.waiting import eventually, until
from workers.agent.programs import Programs

A, B, C = "192.168.100.11", "192.168.100.12", "192.168.100.13"
IB = [
    "host:1:1 [0] NCCL INFO NET/IB : Using [0]rocep1s0f1:1/RoCE [1]roceP2p1s0f1:1/RoCE [RO]; OOB x:1.1.1.1<0>",
    "host:1:1 [0] NCCL INFO Using network IB",
]
GOOD = Rate(A, B, 21.5, "nccl", "IB", 2, (), False, True, MOST_BYTES, 5.0)


class FakeNodes:
    """Agents that measure at once what they are told to say; nodes: their readings."""

    node_ip = A

    def __init__(self, nodes: Mapping[str, Mapping[str, Any]]) -> None:
        self.readings = dict(nodes)
        self.asked: list[tuple[str, str, tuple[Any, ...]]] = []
        self.said: Any = {"ended": True, "gb_s": 21.5, "sent_bytes": MOST_BYTES, "nccl": IB, "done_bytes": 1}
        self.moved: dict[str, int] = {}
        self.waits = False

    def in_sight(self) -> list[str]:
        return list(self.readings)

    async def fabric(self) -> dict[str, Mapping[str, Any] | None]:
        after = any(method == "rate" for _, method, _ in self.asked)
        return {node: self._grown(raw) if after else raw for node, raw in self.readings.items()}

    async def ask(self, node_ip: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        assert timeout_s > 0
        self.asked.append((node_ip, method, arguments))
        if method == "job_state" and self.waits:
            return {}
        if method == "job_state" and isinstance(self.said, Exception):
            raise self.said
        answers = {"runtime": {"platform": "cuda"}, "free_port": 7000, "rate": f"job {node_ip}"}
        return self.said if method == "job_state" else answers.get(method)

    def of(self, method: str) -> list[tuple[str, tuple[Any, ...]]]:
        return [(node, arguments) for node, asked, arguments in self.asked if asked == method]

    def _grown(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        ports = [one | {"sent_bytes": one["sent_bytes"] + self.moved.get(one["name"], 1 << 28)} for one in raw["rdma"]]
        return {**raw, "rdma": ports}


class Scene:
    def __init__(self, folder: Path, supervised: Supervised, nodes: FakeNodes, **settings: Any) -> None:
        self.nodes = nodes
        self.supervised = supervised
        self.folder = folder
        self.config = load_config(None, flags={"state_dir": str(folder / "own"), **settings}, environ={})
        self.store = Store(folder / "own.db")
        self.journal = Journal(self.store, lambda: 5.0)
        self.jobs = Jobs(self.journal, Boundary(time.monotonic))
        self.measures = self.again()

    def again(self) -> Bandwidth:
        rates = RateBook(self.folder)
        return Bandwidth(self.nodes, self.journal, self.jobs, lambda: self.config, self.supervised.supervisor.snapshot, rates, lambda: 5.0)

    async def ended(self, operation: Operation) -> Operation:
        await eventually(lambda: self.journal.operations.find(operation.id).state is not OperationState.RUNNING)
        return self.journal.operations.find(operation.id)


@asynccontextmanager
async def scene(folder: Path, nodes: FakeNodes | None = None, **settings: Any) -> AsyncIterator[Scene]:
    async with stage(folder) as supervised:
        made = Scene(folder, supervised, nodes or pair(), **settings)
        running = asyncio.create_task(made.jobs.run())
        await asyncio.sleep(0)
        try:
            yield made
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            made.store.close()


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "POLL_S", 0.0)


def pair() -> FakeNodes:
    return FakeNodes(dict(zip((A, B), readings("pair-different-ports").values(), strict=True)))


async def test_a_rate_is_measured_on_both_nodes_as_their_ranks_would_talk_and_everything_started_is_ended(tmp_path: Path) -> None:
    async with scene(tmp_path, None, **{"engine.env": {"NCCL_DEBUG": "WARN", "HF_TOKEN": "secret"}}) as made:
        ended = await made.ended(await made.measures.start([A, B]))
        (event,) = [one for one in made.journal.events(0, 100) if one.kind == "measure"]

        told = f"{A} - {B}: 21.5 GB/s over 2 rails, 20 to 24 is normal"
        assert (ended.kind, ended.model, ended.state, ended.message) == ("measure", f"{A} - {B}", OperationState.SUCCEEDED, told)
        assert (event.message, event.data["verdict"]) == (f"{told}.", OK)
        (first, (interpreter, order, env)), (second, (_, order_b, env_b)) = made.nodes.of("rate")
        assert (first, second, interpreter) == (A, B, sys.executable)
        common = {"world": 2, "host": A, "port": 7000, "backend": "nccl", "limit_s": bandwidth.LIMIT_S, "total_bytes": MOST_BYTES}
        assert (order, order_b) == (common | {"rank": 0}, common | {"rank": 1})
        assert (env["NCCL_IB_HCA"], env_b["NCCL_IB_HCA"]) == ("=rocep1s0f1,roceP2p1s0f1", "=rocep1s0f0,roceP2p1s0f0")
        assert (env["NCCL_NET"], env["NCCL_DEBUG"], "HF_TOKEN" in env) == ("IB", "WARN", False)
        assert made.nodes.of("end_job") == [(A, (f"job {A}",)), (B, (f"job {B}",))]
        assert (FABRIC_RATE.labels(A, B)._value.get(), FABRIC_NORMAL_RATE.labels(A, B)._value.get()) == (21.5e9, 20e9)
        assert made.measures.rates.proved() == made.again().rates.proved() == {frozenset((A, B))}
        assert made.again().rates.all() == made.measures.rates.all()


async def test_each_two_of_many_are_measured_and_that_opens_a_ring(tmp_path: Path) -> None:
    ring = FakeNodes(dict(zip((A, B, C), readings("ring-of-three").values(), strict=True)))

    async def read(node: str) -> Mapping[str, Any]:
        return ring.readings[node]

    async with scene(tmp_path, ring) as made:
        fabric = FabricNodes(read, made.measures.rates.proved)
        chosen, why = await fabric.team([A, B, C], 3, rdma=True)
        assert chosen == () and lacking(why, "NCCL", "`sparkd fabric --measure all`") == []

        await made.ended(await made.measures.start([A, B]))
        assert await fabric.team([A, B, C], 3, rdma=True) == ((), why)
        ended = await made.ended(await made.measures.start("all"))
        assert ended.message.count("GB/s over") == 3
        assert await fabric.team([A, B, C], 3, rdma=True) == ((A, B, C), "")
        assert await fabric.unlinked([A, B, C], rdma=True) == {}
        found = report(ring.readings, rates=made.measures.rates.all())
        assert found["tensor_parallel"]["all"] is True
        assert [(one["a"], one["b"], one["gb_s"], one["normal_gb_s"]) for one in found["rates"]] == [
            (a, b, 21.5, "20 to 24") for a, b in ((A, B), (A, C), (B, C))
        ]


async def test_a_model_on_the_nodes_is_not_disturbed_unasked(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        await make_ready(made.supervised)
        made.nodes.readings = dict(zip(("n", B), made.nodes.readings.values(), strict=True))
        with pytest.raises(Conflict, match=r"^m would be slowed.*--force"):
            await made.measures.start("all")
        assert (await made.ended(await made.measures.start("all", force=True))).state is OperationState.SUCCEEDED


@pytest.mark.parametrize("nodes", [[A, A], [A, "10.9.9.9"]])
async def test_nodes_that_cannot_be_measured_are_refused(nodes: list[str], tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        with pytest.raises(BadRequest):
            await made.measures.start(nodes)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (AgentLost("The agent is gone."), "The agent is gone."),
        ({"error": "unhandled system error", "nccl": []}, f": {A}: unhandled system error"),
        ({"error": "x", "nccl": ["NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out"]}, "different"),
    ],
)
async def test_what_cannot_be_measured_says_why_and_leaves_nothing_running(said: Any, told: str, tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        made.nodes.said = said
        ended = await made.ended(await made.measures.start([A, B]))
        assert ended.state is OperationState.FAILED and told in ended.message
        assert len(made.nodes.of("end_job")) == 2
        assert made.measures.rates.all() == []


async def test_one_at_a_time_and_it_can_be_cancelled_over_the_admin_api(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        made.nodes.waits = True
        supervisor, cluster = made.supervised.supervisor, made.supervised.cluster
        app = admin_app(supervisor, supervisor.registry, supervisor.journal, cluster, parts_of(bandwidth=made.measures, jobs=made.jobs))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url=f"http://x{ADMIN_ROOT}") as client:
            began = (await client.post("/fabric/measure", json={"nodes": [A, B]})).json()
            again = await client.post("/fabric/measure")
            assert (again.status_code, f"`sparkd cancel {began['operation']}`" in again.text) == (409, True)
            await eventually(lambda: made.nodes.of("job_state"))
            ended = (await client.delete(f"/operations/{began['operation']}")).json()
            assert (ended["state"], ended["progress"]["phase"]) == ("CANCELLED", "measuring")
            await made.jobs.wait_for_cancelled("measure")
            assert len(made.nodes.of("end_job")) == 2
            made.nodes.waits = False
            done = (await client.post("/fabric/measure", json={"nodes": [A, B]})).json()
            await made.ended(made.journal.operations.find(done["operation"]))
            made.supervised.cluster.readings = {node: dict(raw) for node, raw in made.nodes.readings.items()}
            shown = (await client.get("/fabric")).json()
            assert [(one["a"], one["b"], one["gb_s"], one["told"]) for one in shown["rates"]] == [
                (A, B, 21.5, "21.5 GB/s over 2 rails, 20 to 24 is normal")
            ]


async def test_a_twin_that_carries_nothing_is_red_whatever_the_rate(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        made.nodes.moved = {"roceP2p1s0f1": 0}
        ended = await made.ended(await made.measures.start([A, B]))
        assert lacking(ended.message, "21.5 GB/s", "2 rails", "20 to 24", "nothing", "roceP2p1s0f1") == []
        assert finding(made.measures.rates.all()[0]).verdict == FAIL


@pytest.mark.parametrize(
    ("rate", "verdict", "told"),
    [
        (GOOD, OK, ["21.5 GB/s", "2 rails", "20 to 24"]),
        (replace(GOOD, gb_s=13.0), WARN, ["13.0 GB/s", "2 rails", "20 to 24", "35%"]),
        (replace(GOOD, gb_s=13.0, rails=1), OK, ["13.0 GB/s", "1 rail", "13.9"]),
        (replace(GOOD, gb_s=2.1, network="Socket"), FAIL, ["2.1 GB/s", "sockets", "20 to 24", "2 rails", "90%"]),
        (replace(GOOD, gb_s=2.0, rails=0, network="Socket"), OK, ["2.0 GB/s", "sockets", "ConnectX-7", "2.1"]),
        (replace(GOOD, gb_s=0.4, rails=0, lan=True, backend="gloo"), FAIL, ["0.4 GB/s", "sockets", "10GbE", "1"]),
    ],
)
def test_a_rate_is_judged_beside_what_is_normal(rate: Rate, verdict: str, told: list[str]) -> None:
    judged = finding(rate)

    assert (judged.verdict, lacking(judged.evidence, *told), judged.node) == (verdict, [], f"{A} - {B}")
    assert judged.evidence.count("%") == "".join(told).count("%")
    assert bool(judged.cure) is (verdict != OK)
    assert rate.passed is (verdict != FAIL and rate.rails > 0)


# The program's life on a node.


def program(folder: Path, script: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def settled(programs: Programs, job: str) -> dict[str, Any]:
    return until(lambda: (state := programs.job_state(job)).keys() & {"ended", "error"} and state, "its end")


def test_the_program_gets_its_order_on_stdin_and_only_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    said = json.dumps({"ended": True, "gb_s": 1.0})
    programs = Programs()
    script = f"read order; echo $order >{tmp_path}/order; env >{tmp_path}/env; echo '{said}'"
    job = programs.rate(program(tmp_path, script), {"rank": 1}, {"N": "2"})

    assert settled(programs, job) == {"ended": True, "gb_s": 1.0}
    assert json.loads((tmp_path / "order").read_text()) == {"rank": 1}
    assert "N=2" in (tmp_path / "env").read_text() and "secret" not in (tmp_path / "env").read_text()
    programs.end_job(job)
    with pytest.raises(RankError, match="again"):
        programs.job_state(job)


def test_one_that_dies_says_so_and_one_that_hangs_is_ended_with_the_next(tmp_path: Path) -> None:
    programs = Programs()
    assert "exit code 3" in settled(programs, programs.rate(program(tmp_path, "exit 3"), {}, {}))["error"]
    assert settled(programs, programs.rate(program(tmp_path, "kill -ALRM $$"), {}, {}))["error"]
    hangs = programs.rate(program(tmp_path, f"echo $$ >{tmp_path}/pid; exec sleep 3600"), {}, {})
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "it runs")
    assert programs.job_state(hangs) == {}
    programs.end_job(programs.rate(program(tmp_path, "exit 0"), {}, {}))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    with pytest.raises(RankError, match=r"nothing-here .*No such file"):
        programs.rate(str(tmp_path / "nothing-here"), {}, {})
