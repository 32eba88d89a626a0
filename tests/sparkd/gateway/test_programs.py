"""The programs that people point at an endpoint, unchanged and offline, against the gateway and the stub engine.

They come from packages of npm and pip; Java's own client from the machine's JDK. `make test-all` installs what is in programs/.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from sparkd.errors import ModelCannotLoad
from sparkd.gateway.limits import ClientLimits
from tests.sparkd.gateway.fakes import EVENT, KEY, STREAM_HEAD, RawEngine, Running, chunked, serving, soon
from tests.support.waiting import HUNG_S

pytestmark = pytest.mark.rest

HERE = Path(__file__).with_name("programs")

EVERY_S = ClientLimits().heartbeat_s
QUESTION = "What is the capital of France?"
LITELLM = """
import sys, litellm
asked = [{"role": "user", "content": sys.argv[3]}]
for part in litellm.completion("hosted_vllm/tiny", asked, api_base=sys.argv[1], api_key=sys.argv[2], stream=True):
    print(part.choices[0].delta.content or "", end="")
"""


@dataclass
class Program:
    """command, environment: of the gateway's address. needs: what the machine must have."""

    command: Callable[[str], list[str]]
    environment: Callable[[str], dict[str, str]] = lambda _: {}
    needs: str = "node"


def codex(url: str) -> list[str]:
    own = ("-c", f'openai_base_url="{url}/v1"', "--skip-git-repo-check", "-m", "tiny")
    return [str(HERE / "node_modules/.bin/codex"), "exec", *own, QUESTION]


def claude_environment(url: str) -> dict[str, str]:
    own = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": KEY, "ANTHROPIC_MODEL": "tiny"}
    return own | {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}


PROGRAMS = {
    "codex": Program(codex, lambda _: {"CODEX_API_KEY": KEY}),
    "claude code": Program(lambda _: [str(HERE / "node_modules/.bin/claude"), "-p", QUESTION], claude_environment),
    "ai sdk": Program(lambda url: ["node", str(HERE / "ask.mjs"), f"{url}/v1", KEY]),
    "litellm": Program(
        lambda url: [sys.executable, "-c", LITELLM, f"{url}/v1", KEY, QUESTION],
        lambda _: {"LITELLM_LOCAL_MODEL_COST_MAP": "true"},
        sys.executable,
    ),
    "java": Program(lambda url: ["java", str(HERE / "Ask.java"), f"{url}/v1/chat/completions", KEY], needs="java"),
}


@dataclass
class Ended:
    code: int
    said: str


async def run(name: str, gateway: Running, home: Path) -> Ended:
    """The program to its end, with a home of its own and nothing of this environment."""
    program, url = PROGRAMS[name], f"http://127.0.0.1:{gateway.port}"
    if shutil.which(program.needs) is None:
        pytest.skip(f"{program.needs} is not on this machine")
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), **program.environment(url)}
    process = await asyncio.create_subprocess_exec(
        *program.command(url),
        cwd=home,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(process.communicate(), HUNG_S)
    return Ended(process.returncode or 0, said.decode())


@pytest.mark.parametrize("name", PROGRAMS)
async def test_it_is_answered(stubbed: Running, tmp_path: Path, name: str) -> None:
    ended = await run(name, stubbed, tmp_path)
    assert ended.code == 0 and "The capital of France is Paris." in ended.said, ended.said
    assert "401" not in ended.said


@pytest.mark.parametrize("name", PROGRAMS)
async def test_what_lasts_is_asked_once(stubbed: Running, tmp_path: Path, name: str) -> None:
    stubbed.supervisor.refusal = ModelCannotLoad("The model tiny cannot be started. Its folder is gone.")
    ended = await run(name, stubbed, tmp_path)
    assert "Its folder is gone." in ended.said
    assert len(stubbed.supervisor.needs) == (2 if name == "java" else 1)  # Ask.java asks in two ways


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "java"])  # Ask.java asks for no stream
async def test_what_lasts_is_asked_once_where_the_answer_had_begun(engine: RawEngine, tmp_path: Path, name: str) -> None:
    async with serving(engine, limits=ClientLimits()) as gateway:
        supervisor = gateway.supervisor
        supervisor.refusal = ModelCannotLoad("The model tiny cannot be started. Its folder is gone.")
        supervisor.gate.clear()
        running = asyncio.create_task(run(name, gateway, tmp_path))
        await soon(lambda: supervisor.waiting)
        gateway.turn(EVERY_S)
        supervisor.gate.set()
        while not running.done():  # the time in which an answer is cut
            await asyncio.wait({running}, timeout=1)
            gateway.turn(0.1)
        ended = running.result()
    assert ended.code != 0
    assert name == "litellm" or "Its folder is gone." in ended.said
    assert len(supervisor.needs) <= (2 if name == "claude code" else 1)  # it asks once more, for no stream


@pytest.mark.parametrize("name", ["ai sdk", "litellm"])
async def test_a_part_is_not_taken_for_the_whole(engine: RawEngine, tmp_path: Path, name: str) -> None:
    engine.replies(STREAM_HEAD, chunked(EVENT, end=False), then_close=True)
    async with serving(engine) as gateway:
        ended = await run(name, gateway, tmp_path)
    assert ended.code != 0
