"""What `sparkd serve` says where there is no terminal: a line for each change, the answer, and a command that can be copied."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkd.condition import Condition
from sparkd.daemon import console as module
from sparkd.daemon.console import Console
from sparkd.errors import DoesNotFit, EngineError, SparkdError
from sparkd.state.nouns import Progress, Want
from tests.sparkd.control.test_supervisor import UP, stage
from tests.support.fakes import FakeClock, Scene

URL = "http://127.0.0.1:4000"
QUESTION = "What is the capital of France?"


@dataclass
class FakeAsker:
    answer: str | SparkdError = "Paris."
    asked: list[tuple[str, str]] = field(default_factory=list)

    async def chat(self, model: str, question: str, timeout_s: float) -> str:
        self.asked.append((model, question))
        if isinstance(self.answer, SparkdError):
            raise self.answer
        return self.answer


@dataclass
class Show:
    """A console over a scene, its asker, and what it has said."""

    scene: Scene
    asker: FakeAsker
    console: Console
    capsys: pytest.CaptureFixture[str]
    task: asyncio.Task[None] | None = None
    text: str = ""

    async def begin(self, question: str | None) -> None:
        self.task = asyncio.create_task(self.console.run(question))
        await self.scene.settle()

    async def said(self) -> list[str]:
        """The lines since the last call."""
        await self.scene.settle()
        out, err = self.capsys.readouterr()
        assert err == ""
        self.text += out
        return out.splitlines()

    async def rest(self) -> list[str]:
        """The lines until it returns, as it does where there is no terminal."""
        assert self.task is not None
        async with asyncio.timeout(20):
            await self.task
        return await self.said()


@asynccontextmanager
async def showing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    needs_key: bool = False,
    url: str = URL,
    answer: str | SparkdError = "Paris.",
    **flags: Any,
) -> AsyncIterator[Show]:
    monkeypatch.setattr(module, "EVERY_S", 0.0)
    clock = FakeClock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    async with stage(tmp_path, **flags) as scene:
        asker = FakeAsker(answer)
        made = Show(scene, asker, Console(url, scene.supervisor, asker, needs_key=needs_key), capsys)  # type: ignore[arg-type]
        yield made
        if made.task:
            made.task.cancel()


async def load(made: Show, model: str = "m") -> None:
    made.scene.cluster.names = [model]
    made.scene.cluster.show(progress=UP)
    await made.scene.tick(3)


async def test_from_the_start_to_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async with showing(tmp_path, monkeypatch, capsys) as made:
        made.scene.supervisor.want("m", Want.RUNNING, "config")
        await made.begin(QUESTION)
        assert await made.said() == [f"sparkd listens on {URL}", "m: about to begin  (0 s)"]
        await made.scene.tick()
        assert await made.said() == ["m: loading  (0 s)"]
        made.scene.cluster.show(progress=Progress(phase="loading", fraction=0.5))
        await made.scene.tick()
        assert await made.said() == [], "one line for a state, not for each percent"
        made.scene.cluster.show(progress=Progress(phase="warming"))
        await made.scene.tick()
        assert await made.said() == ["m: warming up  (0 s)"]
        await load(made)

        assert made.asker.asked == [("m", QUESTION)]
        assert await made.rest() == [
            "m is ready after 3.0 s",
            "",
            f"You asked    {QUESTION}",
            "It answered  Paris.",
            "             0 s after the start",
            "",
            f"Base URL     {URL}/v1",
            "Model        m",
            "",
            f"curl {URL}/v1/chat/completions \\",
            "  -H 'Content-Type: application/json' \\",
            f"""  -d '{{"model": "m", "messages": [{{"role": "user", "content": "{QUESTION}"}}], "max_tokens": 512, "temperature": 0}}'""",
            "",
            "Ctrl-C ends it, and everything it started.",
        ]


async def test_a_journal_is_told_of_loads_and_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with showing(tmp_path, monkeypatch, capsys) as made:
        made.scene.supervisor.want("m", Want.RUNNING, "config")
        await made.scene.tick()
        await made.begin(None)
        await load(made)

        assert await made.rest() == [f"sparkd listens on {URL}", "m: loading  (0 s)", "m is ready after 1.0 s"]
        assert made.asker.asked == []


async def test_without_a_model_it_says_how_to_bring_one_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with showing(tmp_path, monkeypatch, capsys) as made:
        await made.begin(QUESTION)

        assert await made.rest() == [
            *(f"sparkd listens on {URL}", "", f"Base URL     {URL}/v1"),
            "No model is loaded at start; the first request for one loads it: m.",
            *("", "Ctrl-C ends it, and everything it started."),
        ]


async def test_another_port_is_said_to_who_uses_other_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = "http://127.0.0.1:4001"
    async with showing(tmp_path, monkeypatch, capsys, url=other) as made:
        await made.begin(QUESTION)

        assert f"Other commands find it by export SPARKD_URL={other}" in await made.rest()


async def test_a_load_that_fails_is_told_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with showing(tmp_path, monkeypatch, capsys) as made:
        made.scene.cluster.place_error = DoesNotFit("m asks for [9] GiB; \x1b[31m4 are free.\\")
        made.scene.supervisor.want("m", Want.RUNNING, "config")
        await made.begin(QUESTION)
        await made.scene.tick()

        lines = await made.rest()
        assert lines[2].startswith("m failed (DoesNotFit): m asks for [9] GiB; [31m4 are free.\\ Next try in ")
        assert lines[3] == "No model is ready, so no question was asked. `sparkd ps` and `sparkd logs MODEL` show why."
        assert not [line for line in lines if line.startswith("curl")]
        assert made.asker.asked == []


async def test_the_first_that_is_ready_is_asked_and_each_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = {"a": {"model": "/a"}, "b": {"model": "/b"}, "c": {"model": "/c"}}
    async with showing(tmp_path, monkeypatch, capsys, models=models) as made:
        for name in ("a", "b"):
            made.scene.supervisor.want(name, Want.RUNNING, "config")
        await made.scene.tick()
        await made.begin(QUESTION)
        assert await made.said() == [f"sparkd listens on {URL}", "a: loading", "  b: It waits for its turn: a is started first.  (0 s)"]
        made.scene.cluster.show(alive=False, exit_code=1)
        await made.scene.tick()
        assert (await made.said())[0].startswith("a failed (EngineExited): The engine ended by itself (exit code 1).")
        made.scene.supervisor.want("a", Want.STOPPED, "admin")
        await made.scene.tick(3)
        await load(made, "b")

        assert made.asker.asked == [("b", QUESTION)]
        assert "b is ready after" in "\n".join(await made.rest())


async def test_what_it_waits_for_while_nothing_can_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with showing(tmp_path, monkeypatch, capsys) as made:
        made.scene.supervisor.want("m", Want.RUNNING, "config")
        made.scene.supervisor.tell_refused("line 3 is no YAML.")
        made.scene.supervisor.ledger.trouble = Condition("RayStarting", "Ray is not connected yet.")
        await made.begin(None)
        assert (await made.said())[1] == "m: Ray is not connected yet.  (0 s)"


async def test_an_engine_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async with showing(tmp_path, monkeypatch, capsys, answer=EngineError("The model m answered 500 [/] \x07to its question.")) as made:
        made.scene.supervisor.want("m", Want.RUNNING, "config")
        await made.scene.tick()
        await made.begin(QUESTION)
        await load(made)

        lines = await made.rest()
        assert "The model m answered 500 [/] to its question." in lines
        assert f"curl {URL}/v1/chat/completions \\" in lines


async def test_an_answer_cannot_steer_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = "  [red]Paris[/] \x1b]0;title\x07:smile: " + "x" * 500 + "\\\n"
    async with showing(tmp_path, monkeypatch, capsys, answer=answer) as made:
        made.scene.supervisor.want("m", Want.RUNNING, "config")
        await made.scene.tick()
        await made.begin("[bold]Why[/]?")
        await load(made)

        lines = await made.rest()
        assert "You asked    [bold]Why[/]?" in lines
        assert f"It answered  [red]Paris[/] ]0;title:smile: {'x' * 500}\\" in lines


@pytest.mark.parametrize("needs_key", [False, True])
@pytest.mark.parametrize(
    "question",
    [
        *(QUESTION, 'What\'s "up"?', "$HOME `id` $(id) !!", "two\nlines\tand a tab", "back\\slash \\n\\"),
        *("[bold]é 日本 🙂[/]", "'; id; '", "x" * 9000),
    ],
)
async def test_the_command_can_be_copied_into_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], question: str, needs_key: bool
) -> None:
    async with showing(tmp_path, monkeypatch, capsys, needs_key=needs_key) as made:
        made.scene.supervisor.want("m", Want.RUNNING, "config")
        await made.scene.tick()
        await made.begin(question)
        await load(made)
        await made.rest()
    command = made.text[made.text.index("\ncurl ") : made.text.index("\n\nCtrl-C")]

    script = f"curl() {{ printf '%s\\0' \"$@\"; }}\n{command}"
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    shell = await asyncio.create_subprocess_exec("bash", "-c", script, env={"SPARKD_API_KEY": "a key"}, **pipes)
    out, err = await shell.communicate()
    url, *options = out.decode().split("\0")[:-1]
    assert url == f"{URL}/v1/chat/completions"
    assert options[:-2] == [*(["-H", "Authorization: Bearer a key"] if needs_key else []), "-H", "Content-Type: application/json"]
    assert options[-2] == "-d"
    assert json.loads(options[-1]) == {
        "model": "m",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 512,
        "temperature": 0,
    }
    assert err == b""


def test_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(URL, None, None, needs_key=False)  # type: ignore[arg-type]
    for stop_engines in (True, False):
        console.say_ending(stop_engines)
        console.say_ended(stop_engines)

    console.say_ending(True, 1, 60.0)
    console.say_ending(False, 2, 30.0)

    assert capsys.readouterr().out.splitlines() == [
        "Stopping: engines and Ray end now.",
        "Everything that was started has ended.",
        "Ending: engines keep running for the next daemon.",
        "Engines run on.",
        "Stopping: engines and Ray end. 1 request may finish first, for at most 60 s; a second signal (Ctrl-C) ends it at once.",
        "Ending: engines keep running for the next daemon. 2 requests may finish first, for at most 30 s; a second signal (Ctrl-C) "
        "ends it at once.",
    ]
