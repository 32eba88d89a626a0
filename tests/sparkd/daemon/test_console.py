"""What `sparkd serve` says where there is no terminal: a line for each change, the answer, and a command that can be copied."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from sparkd.daemon import console as module
from sparkd.daemon.console import Console
from sparkd.daemon.daemon import _lan_url
from sparkd.errors import DoesNotFit, EngineError, SparkdError
from sparkd.state.model_state import ModelState
from sparkd.state.nouns import Progress, Want
from tests.sparkd.control.test_supervisor import UP, stage
from tests.support.facts import lacking
from tests.support.fakes import FakeClock, Scene

URL, LAN_URL = "http://127.0.0.1:4000", "http://192.168.1.10:4000"
QUESTION = "What is the capital of France?"


@dataclass
class FakeGatewayClient:
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
    asker: FakeGatewayClient
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
        await self.task
        return await self.said()


@asynccontextmanager
async def showing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    needs_key: bool = False,
    answer: str | SparkdError = "Paris.",
    models_of_words: tuple[str, ...] = (),
    **flags: Any,
) -> AsyncIterator[Show]:
    monkeypatch.setattr(module, "EVERY_S", 0.0)
    clock = FakeClock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    async with stage(tmp_path, **flags) as scene:
        asker = FakeGatewayClient(answer)
        words = {"needs_key": needs_key, "lan_url": LAN_URL, "models": models_of_words}
        made = Show(scene, asker, Console(URL, scene.supervisor, asker, **words), capsys)  # type: ignore[arg-type]
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
        listens, begins = await made.said()
        assert lacking(listens, URL, LAN_URL) == [] and begins.startswith("m: ") and begins.endswith("  (0 s)")
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
        ready, _, asked, answered, after, _, base, page, model, _, *command, _, ends = await made.rest()
        assert [lacking(ready, "m", "3.0 s"), lacking(after, "0 s"), lacking(ends, "Ctrl-C")] == [[]] * 3
        values = [line.split("  ")[-1].strip() for line in (asked, answered, base, page, model)]
        assert values == [QUESTION, "Paris.", f"{URL}/v1", f"{URL}/", "m"]
        assert command == [
            f"curl {URL}/v1/chat/completions \\",
            "  -H 'Content-Type: application/json' \\",
            f"""  -d '{{"model": "m", "messages": [{{"role": "user", "content": "{QUESTION}"}}], "max_tokens": 512, "temperature": 0}}'""",
        ]


def test_a_wildcard_address_is_also_told_as_other_machines_reach_it() -> None:
    addresses = {address.address for each in psutil.net_if_addrs().values() for address in each}
    with socket.create_server(("0.0.0.0", 0)) as wide, socket.create_server(("127.0.0.1", 0)) as here:
        port = wide.getsockname()[1]

        assert _lan_url(here) is None
        routed = any(line.split()[1] == "00000000" for line in Path("/proc/net/route").read_text().splitlines())
        assert (_lan_url(wide) in {f"http://{address}:{port}" for address in addresses}) is routed


async def test_a_journal_is_told_of_loads_and_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with showing(tmp_path, monkeypatch, capsys) as made:
        made.scene.supervisor.want("m", Want.RUNNING, "config")
        await made.scene.tick()
        await made.begin(None)
        await load(made)

        listens, loading, ready = await made.rest()
        assert (lacking(listens, URL), loading, lacking(ready, "m", "ready", "1.0 s")) == ([], "m: loading  (0 s)", [])
        assert made.asker.asked == []


async def test_without_a_model_it_says_how_to_bring_one_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with showing(tmp_path, monkeypatch, capsys) as made:
        await made.begin(QUESTION)

        listens, _, base, page, models, _, ends = await made.rest()
        assert [lacking(listens, URL), lacking(base, f"{URL}/v1"), lacking(page, f"{URL}/")] == [[]] * 3
        assert [lacking(models, "No model", "m"), lacking(ends, "Ctrl-C")] == [[]] * 2


async def test_the_question_goes_to_the_model_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = {name: {"model": "/nowhere"} for name in ("earlier", "m")}
    async with showing(tmp_path, monkeypatch, capsys, models_of_words=("m",), models=both) as made:
        made.scene.cluster.names = list(both)
        for name in both:
            made.scene.supervisor.want(name, Want.RUNNING, "admin")
        await made.begin(QUESTION)
        for name in both:
            await made.scene.tick(2)
            made.scene.cluster.serve(name)
            await made.scene.tick(3)

        assert made.scene.supervisor.snapshot().models["earlier"].state is ModelState.READY
        assert made.asker.asked == [("m", QUESTION)]


async def test_a_load_that_fails_is_told_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with showing(tmp_path, monkeypatch, capsys) as made:
        made.scene.cluster.place_error = DoesNotFit("m asks for [9] GiB; \x1b[31m4 are free.\\")
        made.scene.supervisor.want("m", Want.RUNNING, "config")
        await made.begin(QUESTION)
        await made.scene.tick()

        lines = await made.rest()
        assert lacking(lines[2], "m", "(DoesNotFit)", "[9] GiB; [31m4", "free.\\") == []
        assert lacking(lines[3], "no question", "`sparkd ps`", "`sparkd logs MODEL`") == []
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
        listens, loading, waits = await made.said()
        assert (lacking(listens, URL), loading) == ([], "a: loading")
        assert waits.startswith("  b: ") and lacking(waits, "turn", "a", "(0 s)") == []
        made.scene.cluster.show(alive=False, exit_code=1)
        await made.scene.tick()
        assert lacking((await made.said())[0], "a", "(EngineExited)", "exit code 1") == []
        made.scene.supervisor.want("a", Want.STOPPED, "admin")
        await made.scene.tick(3)
        await load(made, "b")

        assert made.asker.asked == [("b", QUESTION)]
        assert lacking("\n".join(await made.rest()), "b is ready") == []


async def test_an_engine_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async with showing(tmp_path, monkeypatch, capsys, answer=EngineError("It said 500 [/] \x07and more.")) as made:
        made.scene.supervisor.want("m", Want.RUNNING, "config")
        await made.scene.tick()
        await made.begin(QUESTION)
        await load(made)

        lines = await made.rest()
        assert "It said 500 [/] and more." in lines
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


@pytest.mark.parametrize(
    ("question", "needs_key"),
    [
        ("""What's "up"?\n$HOME `id` $(id) !!\tand a tab""", True),
        ("'; id; ' back\\slash \\n\\ [bold]é 日本 🙂[/] " + "x" * 9000, False),
    ],
    ids=["quotes and the shell's own characters, with a key", "what ends a quote, without one"],
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


async def test_the_question_waits_for_no_second_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with showing(tmp_path, monkeypatch, capsys, models={"a": {"model": "/a"}, "b": {"model": "/b"}}) as made:
        for name in ("a", "b"):
            made.scene.supervisor.want(name, Want.RUNNING, "config")
        await made.scene.tick()
        await made.begin(QUESTION)
        await load(made, "a")

        text = "\n".join(await made.rest())
        assert made.asker.asked == [("a", QUESTION)]
        assert text.index("a is ready") < text.index("Paris.") < text.index("b: loading") < text.index("curl")
