"""A plan over the admin API: the guess at once, an operation while vLLM is asked, its numbers afterwards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sparkd.capacity import plan_for_node
from sparkd.execution import tool_process
from sparkd.state.nouns import Reading
from sparkd.units import GIB
from tests.sparkd.admin.test_app import Admin, admin_of

ASKED = {"model": "m", "hardware": "spark"}


@dataclass
class FakeProgram:
    """Stands for the plan's process and for the program that asks vLLM. unanswered: questions that a plan leaves open."""

    unanswered: int = 3
    error: str | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    def plan(self, _: object) -> dict[str, Any]:
        return {"notes": [], "vllm": {"unanswered": self.unanswered}}

    async def run(self, *arguments: Any) -> str:
        heard: Callable[[bytes], Awaitable[None]] = arguments[4]
        await heard(b'{"step": "importing"}')
        self.started.set()
        await self.may_answer.wait()
        if self.error is not None:
            await heard(json.dumps({"error": self.error}).encode())
        self.unanswered = 0
        return ""


def reading(available: int) -> Reading:
    return Reading("n", 0.0, 120 * GIB, available, 1, 1, 1, 1)


@asynccontextmanager
async def with_memory(tmp_path: Path, available: int = 60 * GIB) -> AsyncIterator[Admin]:
    async with admin_of(tmp_path) as made:
        made.scene.cluster.agents, made.scene.cluster.node_readings = ("n",), {"n": reading(available)}
        await made.scene.tick()
        yield made


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> FakeProgram:
    fake = FakeProgram()
    monkeypatch.setattr(plan_for_node, "_answer_of_process", fake.plan)
    monkeypatch.setattr(tool_process, "run", fake.run)
    return fake


async def planned(made: Admin, status: int, **more: Any) -> dict[str, Any]:
    """The fake's plan has none of the figures that its type demands."""
    response = await made.client.post("/admin/v1/plan", json=ASKED | more)
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_the_guess_comes_at_once_and_the_numbers_of_vllm_once_its_operation_has_ended(tmp_path: Path, program: FakeProgram) -> None:
    async with with_memory(tmp_path) as made:
        guess = await planned(made, 202)
        assert guess["href"] == f"/admin/v1/operations/{guess['operation']}"
        await program.started.wait()
        running = await made.ask("GET", f"/operations/{guess['operation']}")
        assert (running["kind"], running["model"], running["state"], running["message"]) == (
            "plan",
            "m",
            "RUNNING",
            "vLLM is being imported",
        )
        assert (await planned(made, 202))["operation"] == guess["operation"], "one for each model"
        program.may_answer.set()
        ended = await made.ask("GET", f"/operations/{guess['operation']}", params={"wait_s": 60})
        assert ended["state"] == "SUCCEEDED"
        assert (await planned(made, 200))["operation"] is None


async def test_the_operation_fails_in_the_words_of_the_program_and_is_begun_anew(tmp_path: Path, program: FakeProgram) -> None:
    program.error = "The vLLM of /x cannot be asked about models: it is broken"
    program.may_answer.set()
    async with with_memory(tmp_path) as made:
        first = (await planned(made, 202))["operation"]
        ended = await made.ask("GET", f"/operations/{first}", params={"wait_s": 60})
        assert (ended["state"], ended["message"]) == ("FAILED", program.error)
        assert (await planned(made, 202))["operation"] != first


async def test_a_cancelled_operation_ends_its_program(tmp_path: Path, program: FakeProgram) -> None:
    async with with_memory(tmp_path) as made:
        operation = (await planned(made, 202))["operation"]
        await program.started.wait()
        assert (await made.ask("DELETE", f"/operations/{operation}", 202))["state"] == "CANCELLED"
        await made.jobs.wait_for_cancelled("plan")
        assert program.unanswered and not made.jobs.running("plan")


async def test_a_plan_that_waited_for_another_asks_no_vllm_once_the_memory_is_gone(tmp_path: Path, program: FakeProgram) -> None:
    async with with_memory(tmp_path) as made:
        await planned(made, 202)
        await program.started.wait()
        program.started.clear()
        waiting = (await planned(made, 202, model="owner/other"))["operation"]
        made.scene.cluster.node_readings = {"n": reading(8 * GIB)}
        await made.scene.tick()
        program.may_answer.set()
        ended = await made.ask("GET", f"/operations/{waiting}", params={"wait_s": 60})
        assert ended["state"] == "FAILED" and "2.0 GiB above" in ended["message"] and not program.started.is_set()


async def test_vllm_is_not_asked_quickly_nor_where_it_has_answered_nor_on_a_node_that_is_short_of_memory(
    tmp_path: Path, program: FakeProgram
) -> None:
    async with with_memory(tmp_path) as made:
        assert (await planned(made, 200, quick=True))["operation"] is None
        # The soft limit of such a node is 6 GiB.
        made.scene.cluster.node_readings = {"n": reading(8 * GIB)}
        await made.scene.tick()
        answer = await planned(made, 200)
        assert answer["operation"] is None and "2.0 GiB above" in answer["notes"][0]
        made.scene.cluster.node_readings = {"n": reading(60 * GIB)}
        program.unanswered = 0
        await made.scene.tick()
        assert (await planned(made, 200))["notes"] == []
